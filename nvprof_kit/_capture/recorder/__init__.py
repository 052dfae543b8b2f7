"""The embedded recorder: PyTorch's own profiler, for where no Nsight is installed."""
