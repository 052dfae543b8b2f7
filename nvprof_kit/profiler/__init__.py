"""What records inside the training process and reads its own recording: the one room of both halves."""

from . import handlers as handlers
