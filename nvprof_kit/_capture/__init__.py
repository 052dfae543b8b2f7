"""Runs nsys, ncu and PyTorch's profiler, and checks the machine before."""
