"""`layer_range`: range functions, coroutines, generators, module classes and blocks of code."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast, overload

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import follow_compiler, skip_compiling, uncompiled_itself
from nvprof_kit._instrument.ranges.ranges import Block, Layer, Range, call_inside, is_ranged
from nvprof_kit._instrument.session import Backend
from nvprof_kit.errors import UsageError, require
from nvprof_kit.names import Category

T = TypeVar("T")


BlockOf = Callable[..., Block | None]
"""Returns the block around a call from the call's arguments; None for none."""


def wrap(function: T, block: Block | BlockOf) -> T:
    """Wrap a function so that each call, or each resume of a coroutine or generator, runs inside a block.

    Args:
        function: A function, coroutine function or generator function, or a ``staticmethod`` or ``classmethod`` of one.
        block: The block, or a function that returns that of a call from its arguments.

    Returns:
        The wrapper, with the same name, signature, kind and pickle; under ``NVPROF_KIT=off``, the function itself.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return cast(T, type(function)(wrap(function.__func__, block)))
    if session.mode == "off":
        return function
    call = cast(Callable[..., Any], function)
    block_of: BlockOf = (lambda *_args, **_kwargs: block) if isinstance(block, Block) else block
    if inspect.isasyncgenfunction(call):
        name = getattr(call, "__qualname__", repr(call))
        raise UsageError(f"{name} is an asynchronous generator; decorate what it awaits")
    if inspect.iscoroutinefunction(call):
        forwarder = _forwarder(call, _resuming(call, block_of, _await_resumes), "async def", "await {}")
    elif inspect.isgeneratorfunction(call):
        forwarder = _forwarder(call, _resuming(call, block_of, _resumes), "def", "(yield from {})")
    else:
        runs = partial(call_inside, block) if isinstance(block, Block) else partial(_call_inside_its, block)
        in_range = partial(runs, call)
        skip_compiling(block_of)
        forwarder = _forwarder(call, in_range, "def", "{}")
    follow_compiler()
    skip_compiling(forwarder, callees=False)
    return cast(T, functools.wraps(call)(forwarder))


@uncompiled_itself
def _call_inside_its(block_of: BlockOf, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    block = block_of(*args, **kwargs)
    return function(*args, **kwargs) if block is None else call_inside(block, function, *args, **kwargs)


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
    signature = inspect.signature(call if plain else lambda *args, **kwargs: None, follow_wrapped=False)
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


def _resuming(call: Callable[..., Any], block_of: BlockOf, resumes: Callable[..., Any]) -> Callable[..., Any]:
    def in_range(*args: Any, **kwargs: Any) -> Any:
        return resumes(call(*args, **kwargs), block_of(*args, **kwargs) or nullcontext())

    return in_range


def _resumes(inner: Generator[Any, Any, Any], scope: AbstractContextManager[Any]) -> Generator[Any, Any, Any]:
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


F = TypeVar("F", bound=Callable[..., Any])


class Scope(Block):
    """A range around a ``with`` block or around each call of a function; reusable and reentrant."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.range,)

    def __call__(self, function: F) -> F:
        """Decorate a function; each call (each resume of a coroutine or generator) is a range."""
        return wrap(function, self)


class Started:
    """A started range that any thread can end, once."""

    __slots__ = ("_backend", "_range")

    def __init__(self, range_: Range) -> None:
        self._backend: Backend | None = session.backend
        self._range = None if self._backend is None else self._backend.start(range_)

    def end(self) -> None:
        """End the range; a second call does nothing."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.end(self._range)


class LayerScope(Layer):
    """A layer's range around a ``with`` block or around calls; inside a backward pass it is a recompute.

    The outputs of a call carry the hooks that range the layer's backward.
    """

    __slots__ = ()

    def __call__(self, function: F) -> F:
        """Decorate a function or an ``nn.Module`` class with the layer's name."""
        return cast(F, _decorate(function, self))


class LayerRange(Protocol):
    """The signatures of `layer_range`."""

    @overload
    def __call__(self, target: F, /, *, backward: bool = True) -> F: ...

    @overload
    def __call__(
        self, target: str, /, *, category: Category | str = Category.FORWARD, backward: bool = True
    ) -> LayerScope: ...

    @overload
    def __call__(
        self,
        /,
        *,
        name: str | Callable[..., str] | None = None,
        category: Category | str = Category.FORWARD,
        backward: bool = True,
    ) -> Callable[[F], F]: ...

    def start(self, name: str, *, category: Category | str = Category.FORWARD) -> Started:
        """Start a range that may end on another thread (``nvtxRangeStartEx``). Tools show it, but no work is attributed
        to it.
        """

    def end(self, started: Started) -> None:
        """End a started range, on any thread; a second call does nothing."""


def _layer_range(
    target: Any = None,
    name: str | Callable[..., str] | None = None,
    category: Category | str = Category.FORWARD,
    backward: bool = True,
) -> Any:
    """Range a layer: its calls, and the backward pass of their outputs.

    ```python
    @layer_range                                    # named after the function: "Block.forward", "attend"
    @layer_range("decoder.attention")               # named
    @layer_range(name=lambda self, x: self.path)    # named by the arguments of each call
    @layer_range
    class Block(nn.Module): ...                     # instances are "Block.0", "Block.1", … in order of creation

    with layer_range("decoder.mlp"): ...            # a block of code, forward only; the object can be reused
    started = layer_range.start("prefetch")
    layer_range.end(started)                        # on any thread
    ```

    You can decorate functions, methods (also below ``staticmethod`` and ``classmethod``), coroutines and generators;
    `inspect` and `pickle` treat them as before. Each resume of a coroutine or generator is one range, so work between
    resumes is outside. An exception closes the range. If no tool is attached, no range is emitted. With
    ``NVPROF_KIT=off`` the decorator returns the function itself.

    Args:
        target: What to decorate, or the name.
        name: The name, or a callable that returns it from the arguments of each call; by default the function's name.
        category: The NVTX category, one of `nvprof_kit.names.Category`, such as ``comm``; by default ``forward``, that
            of a layer.
        backward: Also range the backward pass of the outputs of a decorated call.

    Raises:
        UsageError: The category is unknown, a decorated class is not an ``nn.Module``, or a decorated function is an
            asynchronous generator.
    """
    if type(target) is str:
        return _named_scope(target, category, backward)
    if target is not None:
        return _decorate(target, _block_of(target, name, category, backward))
    return lambda cls_or_function: _decorate(cls_or_function, _block_of(cls_or_function, name, category, backward))


def _start(name: str, *, category: Category | str = Category.FORWARD) -> Started:
    return Started(_named_scope(name, category, False).range)


layer_range = cast(LayerRange, _layer_range)  # a function: calling an instance takes three times as long
layer_range.start = _start  # type: ignore[method-assign]
layer_range.end = Started.end  # type: ignore[assignment, method-assign]
layer_range.__name__ = layer_range.__qualname__ = "layer_range"  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def _named_scope(name: str, category: Category | str, backward: bool) -> LayerScope:
    session.when_torch(_range_checkpoints)
    require(name, str, "layer_range: name", "a text")
    try:
        return LayerScope(name, Category(category), backward)
    except ValueError:
        category_names = ", ".join(member.value for member in Category)
        raise UsageError(f"{category!r} is not a category; use one of {category_names}") from None


def _block_of(
    target: Any, name: str | Callable[..., str] | None, category: Category | str, backward: bool
) -> Block | BlockOf | None:
    """The block around calls, by their arguments; None for a class without a name, which numbers its instances."""
    if callable(name):
        naming = name
        return lambda *args, **kwargs: _named_scope(naming(*args, **kwargs), category, backward)
    if name is None and inspect.isclass(target):
        return None
    qualified = getattr(target, "__qualname__", None) or type(target).__qualname__
    return _named_scope(name or str(qualified).rsplit("<locals>.", maxsplit=1)[-1], category, backward)


def _decorate(target: Any, block: Block | BlockOf | None) -> Any:
    """Wrap a function, or range the forward of every instance of a module class, which is changed in place.

    Without a block, each instance is named ``ClassName.N`` in the order of creation.
    """
    require(target, (Callable, staticmethod, classmethod), "layer_range: target", "a function, a class or a name")  # type: ignore[arg-type]
    if block is not None and not inspect.isclass(target):
        return wrap(target, block)
    session.when_torch(_range_checkpoints)
    from torch import nn

    if not issubclass(target, nn.Module):
        raise UsageError.of("not-a-module-class", name=target.__name__)
    if session.mode == "off":
        return target
    block = block or _number_instances(target)

    def block_unless_ranged(module: Any, /, *args: Any, **kwargs: Any) -> Block | None:
        if is_ranged(module):
            return None
        return block if isinstance(block, Block) else block(module, *args, **kwargs)

    target.forward = wrap(target.forward, block_unless_ranged)
    return target


def _number_instances(cls: type[Any]) -> Callable[..., Any]:
    """Number the instances of a class; a copy gets its number in its first call."""
    scopes: weakref.WeakKeyDictionary[Any, LayerScope] = weakref.WeakKeyDictionary()
    numbers = itertools.count()
    create = cls.__init__

    def scope_of(module: Any, /, *_args: Any, **_kwargs: Any) -> LayerScope:
        scope = scopes.get(module)
        if scope is None:
            scope = scopes[module] = LayerScope(f"{cls.__name__}.{next(numbers)}")
        return scope

    @functools.wraps(create)
    def numbered(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        scope_of(self)

    cls.__init__ = numbered
    return scope_of


def _range_checkpoints() -> None:
    from nvprof_kit._instrument.ranges.backward import range_checkpoints

    range_checkpoints()


session.when_torch(lambda: import_module("nvprof_kit._instrument.ranges.backward"))
