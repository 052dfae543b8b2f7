"""Profiling inside the training process: recording and analysis together."""

from nvprof_kit._profiler import handlers as handlers
