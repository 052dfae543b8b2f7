"""Memory from inside the program: `MemoryProfiler`, allocator snapshots, memory marks."""
