"""Recording and analysis inside the training process."""

from nvprof_kit._profiler import handlers as handlers
