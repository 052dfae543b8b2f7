"""PyTorch profiler (Kineto) traces as tables."""
