"""What records inside the training process and reads its own recording: the one room of both halves."""

from nvprof_kit._profiler import handlers as handlers
