"""Layers of a model: selects the modules, and hooks that range their forward, backward and recompute."""
