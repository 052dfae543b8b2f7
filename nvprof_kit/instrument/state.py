"""Whether ranges are emitted, and to where: decided once from the environment, changed only by the embedded recorder.

Everything that emits reads `backend`: None means quiet. What is installed only while somebody listens (hooks on modules
and optimizers) is listed in `annotated` and is woken and put to sleep as the backend changes.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .backends import Backend, Nvtx

_MODES = ("auto", "on", "off")
_INJECTED = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")
"""Set by nsys (profile and launch, where it traces NVTX) and ncu to the library that NVTX loads."""

_TOOL_HINTS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
"""Set by a tool that may listen to NVTX in another way; then nvtx itself is asked."""


class Installable(Protocol):
    """What is installed on an object of the program only while ranges are emitted."""

    def wake(self) -> None:
        """Install, if not installed."""

    def sleep(self) -> None:
        """Take out whatever is installed."""


def read_mode(environ: Mapping[str, str]) -> str:
    """The mode in ``NVPROF_KIT``: ``auto`` (the default), ``on`` or ``off``; anything else warns and is ``auto``."""
    mode = environ.get("NVPROF_KIT", "auto").strip().lower() or "auto"
    if mode in _MODES:
        return mode
    warnings.warn(f"NVPROF_KIT={mode!r} is none of {', '.join(_MODES)}; taken for auto", stacklevel=2)
    return "auto"


def tool_attached(environ: Mapping[str, str]) -> bool:
    """Whether a tool that records NVTX runs this process; nvtx is imported only where the environment hints at one."""
    if any(environ.get(name) for name in _INJECTED):
        return True
    if not any(environ.get(name) for name in _TOOL_HINTS):
        return False
    import nvtx
    from nvtx._lib import lib

    return hasattr(lib, "DummyDomain") and isinstance(nvtx.get_domain("nvprof_kit"), lib.Domain)


mode = read_mode(os.environ)
backend: Backend | None = None
"""Where ranges go now; None while nobody listens."""

plain: set[type] = {type(None), bool, int, float, str}
"""Types known to hold no tensors; grows as others are found."""

gate: dict[str, Any] = {"__live": False, "__backend": None, "__plain": plain, "__type": type}
"""Globals of the compiled forwarders of decorated functions, each read in one look: whether ranges are emitted
(``__live``), the backend with its thread and pop, and the questions to torch."""

annotated: weakref.WeakKeyDictionary[object, Installable] = weakref.WeakKeyDictionary()
"""What is annotated, and how: woken while ranges are emitted. An annotation lives as long as what it annotates."""


def _switch(new: Backend | None) -> None:
    global backend  # noqa: PLW0603
    backend = new
    gate["__live"] = new is not None
    gate["__backend"] = new
    if new is not None:
        gate["__thread"], gate["__pop"] = new.thread, new.pop
    for installable in list(annotated.values()):
        if new is None:
            installable.sleep()
        else:
            installable.wake()


def _tool_backend() -> Backend | None:
    return Nvtx() if mode == "on" or (mode == "auto" and tool_attached(os.environ)) else None


def activate(recorder: Backend) -> None:
    """Send ranges to a recorder from now on; what was annotated comes alive, except under ``NVPROF_KIT=off``."""
    if mode != "off":
        _switch(recorder)


def deactivate() -> None:
    """Send ranges to where they went before the recorder: to the attached tool, or nowhere, and all goes quiet.

    Ranges that the calling thread opened under the recorder and has not closed are closed here.
    """
    if backend is not None and backend is not _tool:
        backend.close_all()
        _switch(_tool)


def restore(watcher: Backend, before: Backend | None) -> None:
    """Send ranges to where they went before a watcher stood in between, if it still does; open ranges stay open."""
    if backend is watcher:
        _switch(before)


def _meet_torch() -> bool:
    """Stands in for ``is_dynamo_compiling`` until torch is loaded, and then puts torch's own functions into place."""
    global graph_task  # noqa: PLW0603
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    graph_task = gate["__task"] = torch._C._current_graph_task_id
    gate["__grad"] = torch.is_grad_enabled
    gate["__sequence"] = torch.autograd._get_sequence_nr
    gate["__compiling"] = torch.compiler.is_dynamo_compiling
    return False


def _find_graph_task() -> int:
    _meet_torch()
    return -1 if graph_task is _find_graph_task else graph_task()


graph_task: Callable[[], int] = _find_graph_task
"""Number of the backward pass that runs on this thread, -1 where none does (or torch is not loaded)."""

gate |= {"__compiling": _meet_torch, "__task": lambda: -1, "__grad": lambda: False, "__sequence": lambda: 0}
_tool = _tool_backend()
_switch(_tool)
