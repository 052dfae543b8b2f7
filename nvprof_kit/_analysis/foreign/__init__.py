"""Captures with ranges from other programs: rules that map range texts to layers, phases and steps."""
