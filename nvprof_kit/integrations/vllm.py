"""vLLM: a general plug-in (entry point ``vllm.general_plugins``) that vLLM loads in each process.

It does nothing unless a tool is attached or a schedule is set. Both model runners of vLLM
(``vllm.v1.worker.gpu_model_runner`` and ``vllm.v1.worker.gpu.model_runner``) are ranged when the engine imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvprof_kit._instrument.patches import Patch, after_import, instead, warn
from nvprof_kit.integrations._host import engine, listens, load_model, phase_of, sample

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
            hooks = {"load_model": load_model, "execute_model": execute_model, "sample_tokens": sample}
            hooks["_warmup_and_capture"] = capture_size
            for module in RUNNERS:
                after_import(module, lambda module: _put_around(module.GPUModelRunner, **hooks))
            after_import(GRAPHS, lambda module: _put_around(module.CudaGraphManager, capture=capture_sizes))
    except Exception as error:  # vLLM must start without ranges
        warn(f"vLLM is not ranged ({type(error).__name__}: {error})")


def _put_around(cls: Any, **hooks: Callable[..., Any]) -> None:
    for name in hooks.keys() & vars(cls).keys():
        Patch(cls, name, instead(hooks[name]))


def execute_model(method: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Range a batch as a step, from here to the end of its sampling."""
    counts = getattr(scheduler_output, "num_scheduled_tokens", None)
    if not counts or kwargs.get("dummy_run"):
        return method(runner, scheduler_output, *args, **kwargs)
    drafted = getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or {}  # verifying them is decoding
    engine().called(runner, phase_of([count - len(drafted.get(request, ())) for request, count in counts.items()]))
    result = method(runner, scheduler_output, *args, **kwargs)
    if result is not None:  # else `sample_tokens` follows
        engine().sampled(runner)
    return result


def capture_size(method: Callable[..., Any], runner: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
    """Name the layers in the CUDA graph of a batch size."""
    with engine().capturing(getattr(desc, "num_tokens", 0)):
        return method(runner, desc, *args, **kwargs)


def capture_sizes(
    method: Callable[..., Any], manager: Any, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Name the layers in the CUDA graph of each batch size."""

    def create(desc: Any, *more: Any, **named: Any) -> Callable[..., Any]:
        forward = create_forward_fn(desc, *more, **named)

        def run(*call: Any, **options: Any) -> Any:
            with engine().capturing(getattr(desc, "num_tokens", 0)):
                return forward(*call, **options)

        return run

    return method(manager, create, *args, **kwargs)
