"""Annotation without code changes: ``NVPROF_KIT_ANNOTATE=1`` with the folder `site` on ``PYTHONPATH``.

Python then calls `install` in the program and in its Python child processes. Once torch is imported, module calls are
watched until large modules are called. Those are annotated, the loop that calls them is ranged (`loop.HostLoop` with
its own steps), and the watch ends. stderr reports what was annotated and what could not be.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvprof_kit._instrument.flops.count import VARIABLE as COUNT
from nvprof_kit._instrument.flops.count import count_second_step
from nvprof_kit._instrument.patches import (
    Guarded,
    Patch,
    Removable,
    Untraced,
    after_import,
    never_fails,
    skip_compiling,
)

VARIABLE = "NVPROF_KIT_ANNOTATE"

RECORD = "NVPROF_KIT_RECORD"
"""The settings with which a process records itself."""

FIRST = "NVPROF_KIT_ANNOTATE_FIRST"
"""Process id of the first process; child processes that call no module (launchers, compilers) report nothing."""

SITE = Path(__file__).parent / "site"
"""The folder to put on ``PYTHONPATH``."""

SMALL = 100_000
"""Modules with fewer parameters, and without repeated blocks, are not annotated."""

MOST = 8
"""Maximum number of annotated models; then the watch ends."""

PATIENCE = 64
"""The watch ends after this many outermost calls without a new model, once a model was found."""


def environment(
    environ: Mapping[str, str] | None = None, *, annotate: bool = True, count: str = "", record: str = ""
) -> dict[str, str]:
    """The environment variables that annotate, count or record a program without a change of it.

    Args:
        environ: The current environment; `os.environ` by default.
        annotate: Whether to annotate the models: ``NVPROF_KIT_ANNOTATE``.
        count: File to count the second step into: ``NVPROF_KIT_COUNT``.
        record: Settings with which it is recorded: ``NVPROF_KIT_RECORD``.

    Returns:
        These variables and ``PYTHONPATH``, whose existing entries are kept at the end; none if nothing is to be done.
    """
    environ = os.environ if environ is None else environ
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != str(SITE)]
    purposes = {VARIABLE: "1" if annotate else "", COUNT: count, RECORD: record}
    added = {name: value for name, value in purposes.items() if value}
    return {**added, "PYTHONPATH": os.pathsep.join([str(SITE), *folders])} if added else {}


def install() -> None:
    """Record this process, count a step and watch for models once it imports torch; does not raise."""
    try:
        if os.environ.get(RECORD):
            after_import("torch", lambda _torch: _record())
        if os.environ.get(COUNT):
            after_import("torch", lambda _torch: count_second_step())
        if os.environ.get(VARIABLE, "").strip().lower() in ("1", "on", "true", "yes"):
            os.environ.setdefault(FIRST, str(os.getpid()))
            after_import("torch", lambda _torch: _start())
    except Exception as error:  # the program must run without annotation
        say(f"nothing is annotated ({type(error).__name__}: {error})")


def say(text: str) -> None:
    """Print a line to stderr."""
    with suppress(OSError, ValueError):
        print(f"nvprof-kit annotate: {text}", file=sys.stderr, flush=True)


def _record() -> None:
    from nvprof_kit._capture.recorder.recording import begin_recording

    begin_recording(RECORD)


def _start() -> None:
    from nvprof_kit._instrument import session

    if session.mode != "off":
        Watch().begin()


class Watch(Guarded):
    """Watches the outermost calls of modules for models to annotate.

    Attributes:
        found: Name and handle of the annotated models; the name is the class, with a number from the second on.
        failed: Class name and reason for models that could not be annotated.
    """

    def __init__(self) -> None:
        from nvprof_kit.integrations._host import HostLoop

        self.found: list[tuple[str, Any]] = []
        self.failed: list[tuple[str, str]] = []
        self._loop = HostLoop(own_steps=True)
        self._loop.trains = False
        self._began = False
        self._patches: Untraced | None = None
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._quiet = 0
        self._called = False
        self._pid = os.getpid()
        self._inside = threading.local()

    def begin(self) -> None:
        """Start watching module calls and the construction of optimizers."""
        import torch
        from torch import nn

        def install() -> list[Removable]:
            return [
                Patch(nn.Module, "__call__", self._watching),
                Patch(torch.optim.Optimizer, "__init__", self._noting_optimizer),
            ]

        self._patches = Untraced(install)
        atexit.register(self.report)

    def undo(self) -> None:
        """End the watch."""
        if self._patches is not None:
            self._patches.remove()

    def _is_over(self) -> bool:
        return self.broken or len(self.found) >= MOST or (bool(self.found) and self._quiet >= PATIENCE)

    def _watching(self, call: Any) -> Any:
        inside, look_at = self._inside, self.look_at

        # PyTorch's profiler with stacks expects the called module as `self` in a frame with this code
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "a_call", False):
                return call(self, *args, **kwargs)
            look_at(self)
            inside.a_call = True
            try:
                return call(self, *args, **kwargs)
            finally:
                inside.a_call = False

        skip_compiling(watched, callees=False)
        return watched

    def _noting_optimizer(self, init: Any) -> Any:
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._loop.trains = self._loop.trains or None
            self._loop.know_optimizer(optimizer)

        return noted

    @never_fails
    def look_at(self, module: Any) -> None:
        """Annotate the module of an outermost call, if it is large and new."""
        self._quiet += 1
        self._called = True
        if module in self._seen:
            if self._is_over():
                self.undo()
            return
        self._seen.add(module)
        from nvprof_kit._instrument.modules.blocks import Submodule, class_name, find_blocks, unwrapped
        from nvprof_kit.integrations._host import free_name

        is_large = sum(parameter.numel() for parameter in module.parameters()) >= SMALL
        if os.getpid() != self._pid or not (is_large or len(find_blocks(Submodule("", module))) > 1):
            return
        model = unwrapped(module)
        self._seen.add(model)
        name = free_name(class_name(model), [name for name, _handle in self.found])
        try:
            self._annotate(model, name)
        except Exception as error:
            self.failed.append((name, str(error)))
            say(f"could not annotate {name}: {error}")

    def _annotate(self, model: Any, name: str) -> None:
        from nvprof_kit._instrument.loop.annotate import annotate_model
        from nvprof_kit.integrations._host import annotate_under, is_ranged
        from nvprof_kit.names import layer_index

        inside = set(map(id, model.modules())) - {id(model)}
        for entry in [entry for entry in self.found if id(entry[1]._owner()) in inside]:
            entry[1].remove()  # it turns out to be a part of this one, which is annotated as a whole
            self.found.remove(entry)
        if model in self._parts:
            pass  # a part of a model that was annotated before, called by itself
        elif is_ranged(model):
            say(f"{name} is already annotated by the program; nothing to do")
        else:
            handle = annotate_under(name, model) if self.found else annotate_model(model, steps=False)
            self.found.append((name, handle))
            self._parts.update(model.modules())
            self._quiet = 0
            ranged, skipped = handle.paths, handle.skipped
            blocks = {path for path in ranged if layer_index(path) != -1 and path.rpartition(".")[2].isdecimal()}
            text = f"annotated {name}: {len(ranged)} modules" + (f", {len(blocks)} blocks among them" if blocks else "")
            if skipped:
                path, reason = next(iter(skipped.items()))
                text += f"; without {len(skipped)}, as {path}: {reason}"
            say(text)
        if self._began:
            self._loop.add(model)
        else:
            self._began = True
            self._loop.begin(model)

    def report(self) -> None:
        """Report at exit which modules had no ranges."""
        if os.getpid() != self._pid:
            return
        from nvprof_kit._instrument import session

        nothing = not (self.found or self.failed or self._began or session.was_annotated)
        is_first = os.environ.get(FIRST) == str(self._pid) and "torch.distributed.run" not in sys.modules
        if nothing and (self._called or is_first):
            reason = f"no module of {SMALL} parameters or with repeated blocks was called in this process"
            say(f"{reason}; nothing is annotated in it")
        for name, handle in self.found:
            inside, never = handle.inside_compiled, handle.never_entered()
            if inside:
                say(f"{name}: {len(inside)} modules have no range of their own inside what torch.compile compiled")
            elif never and len(never) < len(handle.paths):
                say(f"{name}: {len(never)} of {len(handle.paths)} modules were never called, first {never[0]}")
