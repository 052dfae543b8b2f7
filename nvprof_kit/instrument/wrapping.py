"""Wrappers of functions that cost next to nothing while nobody listens and look like what they wrap.

A wrapper that takes ``*args, **kwargs`` costs more than the check it is there for. So each function gets a forwarder
compiled with the function's own parameters, which reads one global and calls the function.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

from . import state
from .backends import Range

F = TypeVar("F")


class Runs(AbstractContextManager[Any], Protocol):
    """A context manager that can also call a function inside itself (`scope.Scope`)."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function inside the context."""


class Fixed(Runs, Protocol):
    """A scope that is the same at each call and can be inlined (`scope.Scope`)."""

    range: Range
    recompute: Range
    followed: Any
    owner: object

    def leave(self, outputs: Any) -> None:
        """End a call that the forwarder began."""


ScopeOf = Callable[..., Runs]
"""Gives the scope of one call from the call's arguments."""


class Always:
    """The same scope for each call."""

    def __init__(self, scope: Fixed) -> None:
        self.scope = scope

    def __call__(self, *_args: Any, **_kwargs: Any) -> Fixed:
        """The scope of a call."""
        return self.scope


def wrap(function: F, scope_of: ScopeOf) -> F:
    """Wrap a function so that each call, or each resume of a coroutine or generator, runs inside a scope.

    Args:
        function: A function, coroutine function, generator function or asynchronous generator function, or a
            ``staticmethod`` or ``classmethod`` of one.
        scope_of: Gives the scope of a call from its arguments.

    Returns:
        The wrapper: same name, signature, kind and pickle; the function itself under ``NVPROF_KIT=off``.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return cast(F, type(function)(wrap(function.__func__, scope_of)))
    if state.mode == "off":
        return function
    call = cast(Callable[..., Any], function)
    if inspect.isasyncgenfunction(call):
        return cast(F, functools.wraps(call)(_async_generator(call, scope_of)))
    if inspect.iscoroutinefunction(call):
        forwarder = _forwarder(call, _resuming(call, scope_of, _await_resumes), "async def", "await {}")
    elif inspect.isgeneratorfunction(call):
        forwarder = _forwarder(call, _resuming(call, scope_of, _resumes), "def", "(yield from {})")
    elif isinstance(scope_of, Always):
        forwarder = _forwarder_into_one(call, _calling(call, scope_of), scope_of.scope)
    else:
        forwarder = _forwarder(call, _calling(call, scope_of), "def", "{}")
    return cast(F, functools.wraps(call)(forwarder))


_FORWARDER = """
def bind(__call, __ranged):
    {define} forwarder({parameters}):
        return {result}
    return forwarder
"""

_FORWARDER_INTO_ONE = """
def bind(__call, __ranged, __scope, __range, __owner, __layer):
    def forwarder({parameters}):
        if not __live or __compiling():
            return __call({arguments})
        if __range.backend is not __backend{special}:
            return __ranged({arguments})
        __mine = __backend
        __here = __thread.here
        __owners = __here.owners
        __range.push()
        __owners.append(__owner)
        {note}
        __result = None
        try:
            __result = __call({arguments})
            return __result
        finally:
            if {usual}__backend is __mine and __owners and __owners[-1] is __owner:
                {forget}
                __owners.pop()
                __pop()
            else:
                __scope.leave(__result)
    return forwarder
"""
"""All of it in one place, for a call of a helper costs a third of what a range may cost over the tool's own price."""


def _forwarder(call: Callable[..., Any], ranged: Callable[..., Any], define: str, result: str) -> Callable[..., Any]:
    """Compile a function with the parameters of ``call`` that calls it, or ``ranged`` while ranges are emitted."""
    chosen = "(__ranged({arguments}) if __live else __call({arguments}))"
    template = _FORWARDER.replace("{result}", result.format(chosen)).replace("{define}", define)
    return _compile(call, template, {}, ranged)


def _forwarder_into_one(call: Callable[..., Any], ranged: Callable[..., Any], scope: Fixed) -> Callable[..., Any]:
    """Compile a function with the parameters of ``call`` that calls it inside a scope while ranges are emitted.

    The usual call is spelt out. ``ranged`` sees to calls that a backward pass makes, and to arguments that may hold
    tensors to which the backward pass comes from the call; ``leave`` to results that may lead it into the call, and to
    ranges left open. The call is noted for those in it: they make a frame of the note if the backward pass needs one.
    """
    parts = {"special": "", "note": "", "usual": "", "forget": ""}
    if scope.recompute is not scope.range:
        parts["special"] = " or __task() != -1"
    if scope.followed is not None:
        parts["special"] += " or ({holders}) and __grad()"
        parts["note"] = "__here.frame = __noted = (__layer, __sequence(), __here.frame)"
        parts["usual"] = "__here.frame is __noted and (__type(__result) in __plain or __sequence() == __noted[1]) and "
        parts["forget"] = "__here.frame = __noted[2]"
    return _compile(call, _FORWARDER_INTO_ONE, parts, ranged, scope, scope.range, scope.owner, scope.followed)


def _compile(call: Callable[..., Any], template: str, parts: dict[str, str], *bound: Any) -> Callable[..., Any]:
    """Compile a template for the parameters of ``call`` and bind its names."""
    plain = isinstance(call, types.FunctionType)
    signature = inspect.signature(call if plain else _any, follow_wrapped=False)
    for part, text in parts.items():
        template = template.replace(f"{{{part}}}", text)
    parameters, arguments = _source(signature)
    source = template.format(parameters=parameters, arguments=arguments, holders=_holders(signature))
    made: dict[str, Any] = {}
    exec(compile(source, f"<range around {getattr(call, '__qualname__', call)}>", "exec"), state.gate, made)
    forwarder = cast(types.FunctionType, made["bind"](call, *bound))
    if plain:
        forwarder.__defaults__ = call.__defaults__
        forwarder.__kwdefaults__ = call.__kwdefaults__
    return forwarder


def _any(*args: Any, **kwargs: Any) -> None: ...


def _holders(signature: inspect.Signature) -> str:
    """Source of whether an argument may hold tensors; there may be any number in ``*args`` and ``**kwargs``."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    tests = (
        name if parameter.kind in several else f"__type({name}) not in __plain"
        for name, parameter in signature.parameters.items()
    )
    return " or ".join(tests) or "False"


def _source(signature: inspect.Signature) -> tuple[str, str]:
    """Source of the parameters of a signature and of the arguments that hand them on; defaults are put in later."""
    parameters: list[str] = []
    arguments: list[str] = []
    last = None
    for name, parameter in signature.parameters.items():
        kind = parameter.kind
        if last is parameter.POSITIONAL_ONLY and kind is not last:
            parameters.append("/")
        if kind is parameter.KEYWORD_ONLY and last not in (kind, parameter.VAR_POSITIONAL):
            parameters.append("*")
        star = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
        parameters.append(f"{star}{name}" if parameter.default is parameter.empty else f"{name}=None")
        arguments.append(f"{name}={name}" if kind is parameter.KEYWORD_ONLY else f"{star}{name}")
        last = kind
    if last is inspect.Parameter.POSITIONAL_ONLY:
        parameters.append("/")
    return ", ".join(parameters), ", ".join(arguments)


def _compiling() -> bool:
    """Whether torch.compile traces the caller; then ranges would only break its graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def _calling(call: Callable[..., Any], scope_of: ScopeOf) -> Callable[..., Any]:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return call(*args, **kwargs)
        return scope_of(*args, **kwargs).run(call, args, kwargs)

    return ranged


def _resuming(call: Callable[..., Any], scope_of: ScopeOf, resumes: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        return resumes(call(*args, **kwargs), scope_of(*args, **kwargs))

    return ranged


def _resumes(inner: Generator[Any, Any, Any], scope: Runs) -> Generator[Any, Any, Any]:
    """Run a generator (or a coroutine) with each of its resumes inside the scope: ``yield from`` written out."""
    resume, value = inner.send, None
    while True:
        try:
            with scope:
                yielded = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            value = yield yielded
        except GeneratorExit:
            with scope:
                inner.close()
            raise
        except BaseException as error:
            resume, value = inner.throw, error
        else:
            resume = inner.send


_await_resumes = types.coroutine(_resumes)


def _async_generator(call: Callable[..., AsyncGenerator[Any, Any]], scope_of: ScopeOf) -> Callable[..., Any]:
    async def forwarder(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = call(*args, **kwargs)
        scope = scope_of(*args, **kwargs)
        step = inner.__anext__()
        while True:
            try:
                value = await _await_resumes(cast(Any, step), scope)
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                await _await_resumes(cast(Any, inner.aclose()), scope)
                raise
            except BaseException as error:
                step = inner.athrow(error)
            else:
                step = inner.asend(sent)

    return forwarder
