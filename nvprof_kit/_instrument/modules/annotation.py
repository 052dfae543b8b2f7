"""What `annotate_model` and `annotate_optimizer` return: hooks that are in place only while ranges are emitted."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, TypeVar

from nvprof_kit._instrument.ranges import state
from nvprof_kit.errors import UsageError

Self = TypeVar("Self", bound="Annotation")


class Annotation(ABC):
    """A handle on what is annotated; as a context manager it takes the annotation back at the end.

    Args:
        owner: What is annotated; held weakly.

    Raises:
        UsageError: It is annotated already.
    """

    def __init__(self, owner: Any) -> None:
        if owner in state.annotated:
            raise UsageError(
                f"this {type(owner).__name__} is annotated already; call remove() on the handle of the first annotation"
            )
        self._owner = weakref.ref(owner)
        self._hooks: list[Any] = []
        state.annotated[owner] = self
        if state.backend is not None:
            self.wake()

    @abstractmethod
    def _install(self, owner: Any) -> list[Any]:
        """Install the hooks; returns their removable handles."""

    def wake(self) -> None:
        """Install the hooks, if not installed: ranges are emitted from now on."""
        owner = self._owner()
        if owner is not None and not self._hooks and state.mode != "off":
            self._hooks = self._install(owner)

    def sleep(self) -> None:
        """Take the hooks out: nobody listens."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def remove(self) -> None:
        """Take the annotation back; a second call does nothing. It may be annotated again afterwards."""
        self.sleep()
        owner = self._owner()
        if owner is not None and state.annotated.get(owner) is self:
            del state.annotated[owner]

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()
