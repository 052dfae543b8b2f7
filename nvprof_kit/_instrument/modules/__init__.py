"""Layers of a model: which modules they are, and hooks that emit their forward, backward and recompute."""
