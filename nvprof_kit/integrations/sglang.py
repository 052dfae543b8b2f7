"""SGLang: a plug-in (entry point ``sglang.srt.plugins``) that SGLang loads in each process.

It does nothing unless a tool is attached or a schedule is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvprof_kit._instrument.patches import warn
from nvprof_kit.integrations._host import engine, listens, load_model, sample

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_PHASES = {"EXTEND": "prefill", "SPLIT_PREFILL": "prefill", "DLLM_EXTEND": "prefill", "MIXED": "mixed", "IDLE": "idle"}


def register() -> None:
    """Range SGLang's model runner if a tool is attached or a schedule is set; called by SGLang."""
    try:
        if listens():
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType

            for name, hook in (("load_model", load_model), ("forward", forward), ("sample", sample)):
                HookRegistry.register(f"{RUNNER}.{name}", hook, HookType.AROUND)
            HookRegistry.register(f"{GRAPHS}.capture_one_shape", capture_one_shape, HookType.AROUND)
    except Exception as error:  # SGLang must start without ranges
        warn(f"SGLang is not ranged ({type(error).__name__}: {error})")


def forward(method: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Range a batch as a step, from here to the end of its sampling."""
    mode = getattr(forward_batch, "forward_mode", None)
    engine().called(runner, _PHASES.get(getattr(mode, "name", ""), "decode"))
    return method(runner, forward_batch, *args, **kwargs)


def capture_one_shape(method: Callable[..., Any], graphs: Any, size: int, *args: Any, **kwargs: Any) -> Any:
    """Name the layers in the CUDA graph of a batch size."""
    with engine().capturing(size):
        return method(graphs, size, *args, **kwargs)
