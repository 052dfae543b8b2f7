"""Wraps functions with almost no overhead while no ranges are emitted, and preserves their metadata.

A wrapper with ``*args, **kwargs`` costs more than the check whether ranges are emitted. So each function gets a
forwarder compiled with the function's own parameters, which reads one global and calls the function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

from nvprof_kit._instrument import session
from nvprof_kit._instrument.ranges.ranges import Block, ranged
from nvprof_kit._instrument.torch_compat import skip_compiling, skip_compiling_ranges

F = TypeVar("F")


class Runs(AbstractContextManager[Any], Protocol):
    """A context manager that can also call a function inside its context (`layer_range.Scope`)."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function inside the context."""


ScopeOf = Callable[..., Runs]
"""Returns the scope of a call from the call's arguments."""


class Always:
    """Returns the same scope for each call."""

    def __init__(self, scope: Block) -> None:
        self.scope = scope

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the scope."""
        return self.scope


def wrap(function: F, scope_of: ScopeOf) -> F:
    """Wrap a function so that each call, or each resume of a coroutine or generator, runs inside a scope.

    Args:
        function: A function, coroutine function, generator function or asynchronous generator function, or a
            ``staticmethod`` or ``classmethod`` of one.
        scope_of: Returns the scope of a call from its arguments.

    Returns:
        The wrapper, with the same name, signature, kind and pickle; under ``NVPROF_KIT=off``, the function itself.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return cast(F, type(function)(wrap(function.__func__, scope_of)))
    if session.mode == "off":
        return function
    call = cast(Callable[..., Any], function)
    if inspect.isasyncgenfunction(call):
        return cast(F, functools.wraps(call)(_async_generator(call, scope_of)))
    if inspect.iscoroutinefunction(call):
        forwarder = _forwarder(call, _resuming(call, scope_of, _await_resumes), "async def", "await {}")
    elif inspect.isgeneratorfunction(call):
        forwarder = _forwarder(call, _resuming(call, scope_of, _resumes), "def", "(yield from {})")
    elif isinstance(scope_of, Always):
        forwarder = _forwarder(call, ranged(call, scope_of.scope), "def", "{}")
    else:
        forwarder = _forwarder(call, _calling(call, scope_of), "def", "{}")
    skip_compiling_ranges()
    skip_compiling(forwarder, callees=False)
    return cast(F, functools.wraps(call)(forwarder))


_FORWARDER = """
def bind(__call, __ranged):
    {define} forwarder({parameters}):
        return {result}
    return forwarder
"""


def _forwarder(call: Callable[..., Any], in_range: Callable[..., Any], define: str, result: str) -> Callable[..., Any]:
    """Compile a function with the parameters of ``call`` that calls it, or ``in_range`` while ranges are emitted."""
    session.find_torch()
    plain = isinstance(call, types.FunctionType)
    signature = inspect.signature(call if plain else _any, follow_wrapped=False)
    parameters, arguments = _source(signature)
    chosen = f"(__call({arguments}) if not __live or __compiling() else __ranged({arguments}))"
    source = _FORWARDER.format(define=define, parameters=parameters, result=result.format(chosen))
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<range around {getattr(call, '__qualname__', call)}>", "exec"), session.gate, namespace)
    forwarder = cast(types.FunctionType, namespace["bind"](call, in_range))
    if plain:
        forwarder.__defaults__ = call.__defaults__
        forwarder.__kwdefaults__ = call.__kwdefaults__
    return forwarder


def _any(*args: Any, **kwargs: Any) -> None: ...


def _source(signature: inspect.Signature) -> tuple[str, str]:
    """Source of a signature's parameters and of the arguments that forward them; defaults are inserted later."""
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


def _calling(call: Callable[..., Any], scope_of: ScopeOf) -> Callable[..., Any]:
    def in_range(*args: Any, **kwargs: Any) -> Any:
        return scope_of(*args, **kwargs).run(call, args, kwargs)

    skip_compiling(scope_of)
    skip_compiling(in_range, callees=False)
    return in_range


def _resuming(call: Callable[..., Any], scope_of: ScopeOf, resumes: Callable[..., Any]) -> Callable[..., Any]:
    def in_range(*args: Any, **kwargs: Any) -> Any:
        return resumes(call(*args, **kwargs), scope_of(*args, **kwargs))

    return in_range


def _resumes(inner: Generator[Any, Any, Any], scope: Runs) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine with each resume inside the scope, like ``yield from``."""
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
