"""The exceptions that the package raises on purpose.

Each message is one line: what was found, what was needed, what to do. The command line prints it to stderr and exits
with the exception's ``exit_code``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from numbers import Integral
from typing import TYPE_CHECKING, TypeVar

from nvprof_kit._toml import read_toml

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

PATH = (str, os.PathLike)
"""The kinds of a path, for `require`."""


class NvprofKitError(Exception):
    """Base class of the exceptions that the package raises on purpose.

    Args:
        message: The message.
        exit_code: In place of that of the class.

    Attributes:
        exit_code: Exit status of the command line: 2 for bad input or usage, 3 for a missing tool.
    """

    exit_code: int = 2

    def __init__(self, *message: object, exit_code: int | None = None) -> None:
        super().__init__(*message)
        if exit_code is not None:
            self.exit_code = exit_code

    @classmethod
    def of(cls, code: str, /, **facts: object) -> Self:
        """An exception with a sentence of ``errors.toml``, where the long ones stand.

        Args:
            code: The name of the sentence: what is wrong.
            facts: What the sentence names.
        """
        return cls(read_toml("nvprof_kit", "errors.toml")[code].format(**facts))


class CaptureError(NvprofKitError):
    """A capture cannot be read, or lacks data that the question needs."""


class UsageError(NvprofKitError):
    """An argument or option is invalid, or options contradict each other."""


class ToolError(NvprofKitError):
    """A required tool or library (nsys, ncu, PyTorch, …) is missing, too old, or failed."""

    exit_code = 3


def require(value: T, kinds: type | tuple[type, ...], argument: str, needed: str) -> T:
    """The value of an argument, if it is of one of these kinds.

    Args:
        value: The value.
        kinds: Its allowed types.
        argument: The argument's name, with that of its function: ``LayerProfiler: folder``.
        needed: What it takes, for the message: ``a path``.

    Raises:
        UsageError: It is of another kind.
    """
    if isinstance(value, kinds):
        return value
    found = repr(value) if isinstance(value, (str, int, float, tuple, list)) else f"a {type(value).__name__}"
    raise UsageError(f"{argument} is {found}; needed {needed}")


def require_choice(value: object, choices: Iterable[str], argument: str) -> None:
    """Refuse a value that is none of an argument's choices; None is the default of each argument.

    Raises:
        UsageError: It is none of them.
    """
    choices = tuple(choices)
    if value is not None and value not in choices:
        raise UsageError(f"{argument}={value!r}: no such choice; available: {', '.join(choices)}")


def require_positive(value: object, argument: str) -> None:
    """Refuse what is no number of things; None is the default of each argument.

    Raises:
        UsageError: It is no whole number of 1 or more.
    """
    if value is not None and not (isinstance(value, Integral) and int(value) > 0):
        raise UsageError(f"{argument}={value!r}: needed a whole number, 1 or more")
