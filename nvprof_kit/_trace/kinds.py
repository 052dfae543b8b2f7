"""What a file is, by its first bytes, and which verb reads it."""

from __future__ import annotations

_KINDS = (
    (b"SQLite format 3\x00", "an SQLite file, as nsys exports: `nvprof-kit layers` and its like read it"),
    (b"NVR\x00", "an ncu report: `nvprof-kit ncu layers` reads it"),
    (b'"ID",', "a page of ncu: `nvprof-kit ncu layers` reads it"),
    (b"[RANK ", "a log of global_timer: `nvprof-kit timers` reads it"),
    (b"\x80", "a pickle: `nvprof-kit memory` reads snapshots of PyTorch's allocator"),
    (b"\x1f\x8b", "a gzip file, as PyTorch traces are: `nvprof-kit layers` and its like read these"),
    (b"{", "JSON, as PyTorch traces are: `nvprof-kit layers` and its like read these"),
)


def told_by(head: bytes) -> str:
    """What a file that begins so is, '' where that is not known."""
    if b"NVIDIA" in head and b"Report" in head:
        return "an nsys report: `nvprof-kit layers` and its like read it"
    return next((kind for begin, kind in _KINDS if head.startswith(begin)), "")
