"""Changes to PyTorch, and to other libraries: what is replaced is put back.

Importing the package changes nothing. What must be changed in PyTorch is changed once, for the first that needs it, and
taken back with the last: each such change is a `Shared`, and who needs it holds it (`Shared.hold`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

from nvprof_kit._instrument.compile.uncompiled import leave_to_python, uncompiled

_MISSING = object()


class Patch:
    """An attribute that is replaced until `remove`.

    If other code has replaced it again in the meantime, `remove` keeps that replacement; ours then calls the original.

    Args:
        holder: The module, class or object that has the attribute.
        name: The attribute.
        make: Makes the replacement from the original, as looked up on the holder.
    """

    def __init__(self, holder: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self._holder = holder
        self._name = name
        self._make = make
        self._own = vars(holder).get(name, _MISSING)
        original = getattr(holder, name)
        self._new = make(original)
        if isinstance(original, MethodType) and original.__self__ is holder and not isinstance(holder, type):
            self._new = MethodType(_of_this_alone(holder, original, self._new), holder)
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


def _of_this_alone(holder: Any, original: MethodType, new: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is new on one object. A copy of the object takes it along, and there it is the original; a pickle
    loads with the class's own.
    """
    itself = weakref.ref(holder)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is itself():
            return new(*args, **kwargs)
        return original.__func__(self, *args, **kwargs)

    leave_to_python(method, callees=False)
    return method


class Hook:
    """A function as a hook on an object of the program; what is registered is `call`.

    A copied or pickled object takes along a hook that does nothing, and that loads without this package.
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
"""Takes anything, does nothing, and can be pickled without this package."""


class Hold:
    """One user's need of a `Shared`; it ends with `remove`, or with the user."""

    def __init__(self, user: object, release: Callable[[], None]) -> None:
        self._finalizer = weakref.finalize(user, release)
        self._finalizer.atexit = False

    def remove(self) -> None:
        """The user needs it no more; a second call does nothing."""
        self._finalizer()


class Shared:
    """A change that several may need: installed for the first of them, undone after the last.

    Args:
        install: Installs it. Called for each user: what is in place stays, what somebody has taken out comes back.
        undo: Undoes it.
    """

    def __init__(self, install: Callable[[], None], undo: Callable[[], None]) -> None:
        self._install = install
        self._undo = undo
        self._count = 0
        self._lock = threading.RLock()  # a user may die, by a garbage collection, while another one comes

    def hold(self, user: object) -> Hold:
        """Have it installed as long as the user, which is held weakly, lives and the result is not removed."""
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
    """Several patches that come and go together, for a `Shared`.

    Args:
        make: Makes them. Where it raises, it leaves none.
    """

    def __init__(self, make: Callable[[], list[Patch]]) -> None:
        self._make = make
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Make them, if they are not in place."""
        if not self._patches:
            self._patches = self._make()

    def undo(self) -> None:
        """Put everything back."""
        patches, self._patches = self._patches, []
        for patch in reversed(patches):
            patch.remove()
