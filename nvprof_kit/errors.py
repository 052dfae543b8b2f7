"""The few named errors of the package.

Every message is one line that says what was found, what was needed and what to do. The command line prints it on
stderr and exits with the error's ``exit_code``; nobody else prints it.
"""

from __future__ import annotations


class NvprofKitError(Exception):
    """Base of every error the package raises on purpose.

    Attributes:
        exit_code: The exit status the command line gives: 2 for bad input or usage, 3 for a missing tool.
    """

    exit_code: int = 2


class CaptureError(NvprofKitError):
    """A capture cannot be read, or lacks what the question needs."""


class UsageError(NvprofKitError):
    """A call or a command line asks for something that cannot be done."""


class ToolError(NvprofKitError):
    """A tool that is needed (nsys, ncu, torch) is missing, too old, or failed."""

    exit_code = 3
