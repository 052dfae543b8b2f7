"""Temporary patches of PyTorch and other libraries.

Importing the package changes nothing. Each patch of PyTorch is a `Shared`: installed for its first user and removed
after its last. A user holds it with `Shared.hold`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

from nvprof_kit._instrument.torch_compat import skip_compiling, uncompiled

_MISSING = object()


class Patch:
    """An attribute that is replaced until `remove`.

    If other code has replaced it again in the meantime, `remove` keeps that replacement; ours then calls the original.

    Args:
        holder: The module, class or object that has the attribute.
        name: The attribute.
        make: Makes the replacement from the original, as looked up on the holder.
    """

    def __init__(self, target: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self._holder = target
        self._name = name
        self._make = make
        self._own = vars(target).get(name, _MISSING)
        original = getattr(target, name)
        self._new = make(original)
        if isinstance(original, MethodType) and original.__self__ is target and not isinstance(target, type):
            self._new = MethodType(_of_this_alone(target, original, self._new), target)
        setattr(target, name, self._new)

    def again(self) -> Patch:
        """A new patch with the same arguments, after `remove`."""
        return Patch(self._holder, self._name, self._make)

    def remove(self) -> None:
        """Put the original back."""
        if vars(self._holder).get(self._name) is not self._new:
            return
        if self._own is _MISSING:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._own)


def _of_this_alone(target: Any, original: MethodType, new: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method on one object. On a copy of the object, the replacement calls the original; a pickle loads with
    the method of the class.
    """
    itself = weakref.ref(target)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is itself():
            return new(*args, **kwargs)
        return original.__func__(self, *args, **kwargs)

    skip_compiling(method, callees=False)
    return method


class Hook:
    """A function as a hook on an object of the program; register `call`.

    In a copied or pickled object the hook does nothing, and it can be unpickled without this package.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function

    @uncompiled
    def call(self, *args: Any) -> Any:
        """Call the function."""
        function = self._function
        return None if function is None else function(*args)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"call": nothing}


nothing = nullcontext().__exit__
"""Accepts any arguments, does nothing, and can be pickled without this package."""


class Hold:
    """One user of a `Shared`; ends with `remove`, or when the user is garbage-collected."""

    def __init__(self, user: object, release: Callable[[], None]) -> None:
        self._finalizer = weakref.finalize(user, release)
        self._finalizer.atexit = False

    def remove(self) -> None:
        """End the use; a second call does nothing."""
        self._finalizer()


class Shared:
    """A change with several users: installed for the first and undone after the last.

    Args:
        install: Installs the change. Called for each user: keeps what is in place and restores what others removed.
        undo: Undoes the change.
    """

    def __init__(self, install: Callable[[], None], undo: Callable[[], None]) -> None:
        self._install = install
        self._undo = undo
        self._count = 0
        self._lock = threading.RLock()  # reentrant: a garbage collection may end one user while another is added

    def hold(self, user: object) -> Hold:
        """Install the change until the result is removed or the user, which is held weakly, is garbage-collected."""
        with self._lock:
            self._count += 1
            try:
                self._install()
            except BaseException:
                self._release()
                raise
            return Hold(user, self._release)

    def _release(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._undo()


class Patches:
    """Several patches that are installed together, for a `Shared`.

    Args:
        make: Makes the patches. If it raises, it must leave none installed.
    """

    def __init__(self, make: Callable[[], list[Patch]]) -> None:
        self._make = make
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Install the patches, if not installed."""
        if not self._patches:
            self._patches = self._make()

    def undo(self) -> None:
        """Remove the patches."""
        patches, self._patches = self._patches, []
        for patch in reversed(patches):
            patch.remove()
