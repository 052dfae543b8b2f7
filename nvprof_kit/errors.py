"""The exceptions that the package raises on purpose.

Each message is one line: what was found, what was needed, what to do. The command line prints it to stderr and exits
with the exception's ``exit_code``.
"""

from __future__ import annotations


class NvprofKitError(Exception):
    """Base class of the exceptions that the package raises on purpose.

    Attributes:
        exit_code: Exit status of the command line: 2 for bad input or usage, 3 for a missing tool.
    """

    exit_code: int = 2


class CaptureError(NvprofKitError):
    """A capture cannot be read, or lacks data that the question needs."""


class UsageError(NvprofKitError):
    """An argument or option is invalid, or options contradict each other."""


class ToolError(NvprofKitError):
    """A required tool or library (nsys, ncu, PyTorch, …) is missing, too old, or failed."""

    exit_code = 3
