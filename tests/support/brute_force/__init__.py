"""Slow reference implementations: they compute tables a second time, in another way."""
