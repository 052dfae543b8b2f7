"""Snapshots of PyTorch's CUDA caching allocator as tables."""
