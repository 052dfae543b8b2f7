"""Captures whose ranges another program emitted: rules that turn their texts into layers, phases and steps."""
