"""Broken inputs of every format, and what must hold whatever they are."""
