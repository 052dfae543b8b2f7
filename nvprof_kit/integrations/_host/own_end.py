"""Which optimizers have stepped: tells the end of a step that no framework reports."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn


class OwnEnd:
    """The optimizers of a program, and those of them that have stepped in the current step.

    A program with several optimizers, such as one of a generator and one of a discriminator, has them step one after
    the other, with calls of the models in between. A step is over when all have stepped. An optimizer that was made
    but never steps is left out once another one steps twice without it.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._expected: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_others: weakref.WeakKeyDictionary[nn.Module, tuple[int, bool]] = weakref.WeakKeyDictionary()

    @property
    def any(self) -> bool:
        """Whether any optimizer is known."""
        return len(self._known) > 0

    def know(self, optimizer: Any) -> None:
        """An optimizer was made."""
        self._known.add(optimizer)
        self._expected.add(optimizer)

    def steps(self, optimizer: Any) -> None:
        """An optimizer steps."""
        if optimizer in self._stepped:
            self._expected = weakref.WeakSet(self._stepped)
        if optimizer not in self._known:  # its first step, which nobody waited for, ends the round of the others
            self._stepped.update(self._expected)
        self._known.add(optimizer)
        self._expected.add(optimizer)
        self._stepped.add(optimizer)

    def restart(self) -> None:
        """A step has ended."""
        self._stepped = weakref.WeakSet()

    def is_due(self) -> bool:
        """Whether every optimizer that is expected to step has stepped, or another one with parameters of it."""
        waited = [optimizer for optimizer in self._expected if optimizer not in self._stepped]
        updated = _parameters(self._stepped) if waited else set()
        return all(not updated.isdisjoint(_parameters([optimizer])) for optimizer in waited)

    def is_of_others(self, model: nn.Module) -> bool:
        """Whether there are optimizers, and none has a parameter of this model."""
        known = len(self._known)
        if self._of_others.get(model, (0, False))[0] != known:
            held = _parameters(self._known)
            apart = bool(held) and held.isdisjoint(map(id, model.parameters()))
            self._of_others[model] = known, apart
        return self._of_others.get(model, (0, False))[1]


def _parameters(optimizers: Iterable[Any]) -> set[int]:
    return {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
