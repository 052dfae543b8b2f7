"""Base of the handles of `annotate_model` and `annotate_optimizer`: hooks that exist only while ranges are emitted."""

from __future__ import annotations

import builtins
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from sys import is_finalizing
from typing import Any, Protocol, TypeVar

from nvprof_kit._instrument import session
from nvprof_kit.errors import UsageError


def replace_in_notebook(owner: Any) -> None:
    """Remove an earlier annotation of the same object, in IPython only.

    In a notebook, a cell is rerun, possibly with other options, and the last run applies. In a program, a second
    annotation is an error, because two places would each rely on their own ranges.
    """
    earlier = session.annotated.get(owner)
    if isinstance(earlier, Annotation) and hasattr(builtins, "__IPYTHON__"):
        earlier.remove()


Self = TypeVar("Self", bound="Annotation")


class Removable(Protocol):
    """A removable handle like that of a PyTorch hook."""

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""


class Annotation(ABC):
    """The handle of an annotated object; as a context manager, it removes the annotation at the end.

    Args:
        owner: The annotated object; held weakly.

    Raises:
        UsageError: The object is already annotated.
    """

    def __init__(self, owner: Any) -> None:
        if owner in session.annotated:
            raise UsageError(
                f"this {type(owner).__name__} is already annotated; call remove() on the handle of the first annotation"
            )

        def gone(_owner: object, exits: Callable[[], bool] = is_finalizing) -> None:
            if not exits():  # a global name may be cleared then, a default argument is not
                self.owner_gone()

        self._owner = weakref.ref(owner, gone)
        self._hooks: list[Removable] = []
        self._held: list[Removable] = []
        session.annotated[owner] = self
        session.was_annotated = True
        if session.backend is not None:
            try:
                self.enable()
            except BaseException:
                del session.annotated[owner]
                raise

    @abstractmethod
    def _install(self, owner: Any) -> Iterable[Removable]:
        """Install the hooks; yields the handle of each."""

    def _hold(self, owner: Any) -> Iterable[Removable]:
        """Apply changes to PyTorch that the hooks need; yields the handle of each."""
        return ()

    def enable(self) -> None:
        """Install the hooks, unless installed, because ranges are now emitted."""
        owner = self._owner()
        if owner is None or session.mode == "off":
            return
        try:
            if not self._held:
                for change in self._hold(owner):
                    self._held.append(change)
            if not self._hooks:
                for hook in self._install(owner):
                    self._hooks.append(hook)
        except BaseException:
            self.disable()
            raise

    def disable(self) -> None:
        """Remove all hooks, because ranges are no longer emitted."""
        self.pause()
        changes, self._held = self._held, []
        for change in changes:
            change.remove()

    def pause(self) -> bool:
        """Remove the hooks while torch.compile traces; returns whether there were any."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        return bool(hooks)

    def resume(self) -> None:
        """Install the hooks again after `pause`; more modules may be compiled now, so their places may differ."""
        owner = self._owner()
        if owner is not None and session.backend is not None and session.annotated.get(owner) is self:
            self.enable()

    def remove(self) -> None:
        """Remove the annotation; a second call does nothing. The object can be annotated again."""
        self.disable()
        owner = self._owner()
        if owner is not None and session.annotated.get(owner) is self:
            del session.annotated[owner]

    def owner_gone(self) -> None:
        """The annotated object was garbage-collected."""
        self.disable()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()
