"""Layers from the order of kernels alone, where a capture names none."""
