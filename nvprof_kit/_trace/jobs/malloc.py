"""How the processes that map ranks use the memory of the C library."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_SHARED, _KEPT = 32 << 20, 256 << 20


def keep_freed_memory() -> None:
    """Let this process keep some freed memory instead of returning it to the system at once.

    A map is made of a hundred columns of a few megabytes, of which few live at the same time. With glibc's defaults
    each one's pages are requested anew, which takes a tenth of the time. The setting is of the whole process, so it is
    for processes of our own only. Does nothing where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_SHARED)
    mallopt(_TRIM_THRESHOLD, _KEPT)
