"""Ranges: emitted to NVTX under an attached tool, to Kineto under the embedded recorder."""
