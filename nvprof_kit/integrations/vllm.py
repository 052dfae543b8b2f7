"""vLLM: a general plug-in (entry point ``vllm.general_plugins``) that vLLM loads in each process.

It does nothing unless a tool is attached or a schedule is set. Both model runners of vLLM
(``vllm.v1.worker.gpu_model_runner`` and ``vllm.v1.worker.gpu.model_runner``) are ranged when the engine imports them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nvprof_kit._instrument.patches import after_import, warn
from nvprof_kit.integrations._host import engine, listens, phase_of

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules with a class ``GPUModelRunner``."""

GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
"""Module with the ``CudaGraphManager`` of the newer runner."""

_registered = False


def register() -> None:
    """Range vLLM's model runners if a tool is attached or a schedule is set; called by vLLM, possibly several times."""
    global _registered  # noqa: PLW0603
    if _registered:
        return
    try:
        if listens():
            _registered = True
            for module in RUNNERS:
                after_import(module, _range_runner)
            after_import(GRAPHS, lambda module: _replace(module.CudaGraphManager, "capture", _capturing_each))
    except Exception as error:  # vLLM must start without ranges
        warn(f"vLLM is not ranged ({type(error).__name__}: {error})")


def _range_runner(module: Any) -> None:
    runner = module.GPUModelRunner
    _replace(runner, "load_model", _loading)
    _replace(runner, "execute_model", _executing)
    _replace(runner, "sample_tokens", _sampling)
    _replace(runner, "_warmup_and_capture", _capturing)


def _replace(cls: Any, name: str, make: Callable[..., Callable[..., Any]]) -> None:
    if name in vars(cls):
        setattr(cls, name, functools.wraps(vars(cls)[name])(make(vars(cls)[name])))


def _loading(method: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(runner, *args, **kwargs)
        engine().loaded(runner, getattr(runner, "model", None) or runner.get_model())
        return result

    return load_model


def _executing(method: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        phase = _phase(scheduler_output)
        if phase is None or kwargs.get("dummy_run"):
            return method(runner, scheduler_output, *args, **kwargs)
        engine().called(runner, phase)
        result = method(runner, scheduler_output, *args, **kwargs)
        if result is not None:  # else `sample_tokens` follows
            engine().sampled(runner)
        return result

    return execute_model


def _phase(scheduler_output: Any) -> str | None:
    """The phase of a scheduled batch, None for an empty one; verifying drafted tokens counts as decoding."""
    counts = getattr(scheduler_output, "num_scheduled_tokens", None)
    if not counts:
        return None
    drafted = getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or {}
    return phase_of([count - len(drafted.get(request, ())) for request, count in counts.items()])


def _sampling(method: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(runner, *args, **kwargs)
        finally:
            engine().sampled(runner)

    return sample_tokens


def _capturing(method: Callable[..., Any]) -> Callable[..., Any]:
    def capture(runner: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
        with engine().capturing(getattr(desc, "num_tokens", 0)):
            return method(runner, desc, *args, **kwargs)

    return capture


def _capturing_each(method: Callable[..., Any]) -> Callable[..., Any]:
    def capture(manager: Any, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def create(desc: Any, *own: Any, **named: Any) -> Callable[..., Any]:
            forward = create_forward_fn(desc, *own, **named)

            def run(*given: Any, **options: Any) -> Any:
                with engine().capturing(getattr(desc, "num_tokens", 0)):
                    return forward(*given, **options)

            return run

        return method(manager, create, *args, **kwargs)

    return capture
