"""Verbs that take a capture, check it, and make one that can be given away."""
