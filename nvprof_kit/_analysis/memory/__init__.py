"""Snapshots of the CUDA caching allocator: what was held at the peak, by step and by layer."""
