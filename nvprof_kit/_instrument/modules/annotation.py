"""What `annotate_model` and `annotate_optimizer` return: hooks that are in place only while ranges are emitted."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from nvprof_kit._instrument.ranges import state
from nvprof_kit.errors import UsageError

Self = TypeVar("Self", bound="Annotation")


class Removable(Protocol):
    """A handle, as PyTorch's hooks have them."""

    def remove(self) -> None:
        """Take out what it stands for; a second call does nothing."""


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
                f"this {type(owner).__name__} is already annotated; call remove() on the handle of the first annotation"
            )
        self._owner = weakref.ref(owner, _sleeping(self))
        self._hooks: list[Removable] = []
        self._held: list[Removable] = []
        state.annotated[owner] = self
        if state.backend is not None:
            try:
                self.wake()
            except BaseException:
                del state.annotated[owner]
                raise

    @abstractmethod
    def _install(self, owner: Any) -> Iterable[Removable]:
        """Install the hooks, one by one; gives the handle of each."""

    def _hold(self, owner: Any) -> Iterable[Removable]:
        """Change in PyTorch what the hooks need besides; gives the handle of each change."""
        return ()

    def wake(self) -> None:
        """Install the hooks, if not installed: ranges are emitted from now on."""
        owner = self._owner()
        if owner is None or state.mode == "off":
            return
        try:
            if not self._held:
                for change in self._hold(owner):
                    self._held.append(change)
            if not self._hooks:
                for hook in self._install(owner):
                    self._hooks.append(hook)
        except BaseException:
            self.sleep()
            raise

    def sleep(self) -> None:
        """Remove all hooks, because ranges are no longer emitted."""
        self.pause()
        held, self._held = self._held, []
        for one in held:
            one.remove()

    def pause(self) -> bool:
        """Take the hooks out while torch.compile traces; says whether there were any."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        return bool(hooks)

    def resume(self) -> None:
        """Put the hooks back after a `pause`, each where it belongs now that more may be compiled."""
        owner = self._owner()
        if owner is not None and state.backend is not None and state.annotated.get(owner) is self:
            self.wake()

    def remove(self) -> None:
        """Take the annotation back; a second call does nothing. It may be annotated again afterwards."""
        self.sleep()
        owner = self._owner()
        if owner is not None and state.annotated.get(owner) is self:
            del state.annotated[owner]

    def owner_gone(self) -> None:
        """What was annotated is no more."""
        self.sleep()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()


def _sleeping(annotation: Annotation) -> Callable[[object], None]:
    """What takes everything out when the owner is gone, even where the handle is kept."""
    itself = weakref.ref(annotation)

    def sleep(_owner: object) -> None:
        known = itself()
        if known is not None:
            known.owner_gone()

    return sleep
