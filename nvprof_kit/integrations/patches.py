"""Replacing an attribute of a foreign module, class or object, and putting it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patch:
    """An attribute that is replaced until `remove`.

    Where somebody has replaced it once more meanwhile, `remove` leaves theirs in place; ours below then does what the
    original does.

    Args:
        holder: The module, class or object that has the attribute.
        name: The attribute.
        make: Makes the replacement from the original, as looked up on the holder.
    """

    def __init__(self, holder: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._holder = holder
        self._name = name
        self._make = make
        self._own = vars(holder).get(name, _MISSING)
        self._new = make(getattr(holder, name))
        setattr(holder, name, self._new)

    def again(self) -> Patch:
        """The same patch once more, after `remove`."""
        return Patch(self._holder, self._name, self._make)

    def remove(self) -> None:
        """Put the original back."""
        if vars(self._holder).get(self._name) is not self._new:
            return
        if self._own is _MISSING:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._own)
