"""The embedded recorder: PyTorch's profiler, for machines without Nsight."""
