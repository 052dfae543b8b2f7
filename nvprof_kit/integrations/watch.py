"""Watches the calls of modules for models to annotate, in a program without a line of ours.

Once a large module is called from outside, it is annotated, and the loop that calls it is ranged (`HostLoop` with its
own steps); then the watch ends. stderr reports what was annotated and what could not be.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.annotate import ModelAnnotation, annotate_model
from nvprof_kit._instrument.loop.loop import takes_over
from nvprof_kit._instrument.modules.blocks import Submodule, class_name, find_blocks, unwrapped
from nvprof_kit._instrument.patches import Guarded, Patch, Untraced, after_import, instead, never_fails, skip_compiling
from nvprof_kit.integrations._host import HostLoop, annotate_under, free_name, is_ranged
from nvprof_kit.names import Category, layer_index

SMALL = 100_000
"""Modules with fewer parameters, and without repeated blocks, are not annotated."""

MAX_MODELS = 8
"""Maximum number of annotated models; then the watch ends."""

MAX_CALLS = 64
"""The watch ends after this many outermost calls without a new model, once a model was found."""


class Watch(Guarded):
    """Watches the outermost calls of modules, and the construction of optimizers, from now on.

    Args:
        report_line: Prints a line for the user.
        is_first: Whether this is the program's first process, not one that it starts.

    Attributes:
        handles: The annotations by name of the model: its class, with a number from the second on.
    """

    def __init__(self, report_line: Callable[[str], None], *, is_first: bool) -> None:
        self._say = report_line
        self._is_first = is_first
        self.handles: dict[str, ModelAnnotation] = {}
        self._loop = HostLoop(own_steps=True)
        self._loop.trains = False
        takes_over.append(self._loop.leave)
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls_since = 0
        self._is_called = self._began = self._has_failed = False
        self._process = os.getpid()
        self._inside, self._lock = threading.local(), threading.RLock()
        call = nn.Module.__call__
        # Dynamo keeps this at its import; it traces into a different call of a module, with guards on our changes
        after_import("torch._dynamo.utils", lambda utils: setattr(utils, "unpatched_nn_module_call", call))
        self._patches = Untraced(
            lambda: [
                Patch(nn.Module, "__call__", self._watching),
                Patch(torch.optim.Optimizer, "__init__", instead(self._note_optimizer)),
            ]
        )
        atexit.register(self.report)

    def undo(self) -> None:
        """End the watch."""
        self._patches.remove()

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

        skip_compiling(look_at)
        skip_compiling(watched, callees=False)
        return watched

    def _note_optimizer(self, init: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        self._loop.trains = self._loop.trains or None
        self._loop.know_optimizer(optimizer)

    @never_fails
    def look_at(self, module: Any) -> None:
        """Annotate the module of an outermost call, if it is large and new."""
        if torch.jit.is_tracing():  # it compares this call with the next
            return
        self._calls_since += 1
        self._is_called = True
        if module in self._seen:
            if len(self.handles) >= MAX_MODELS or (self.handles and self._calls_since >= MAX_CALLS):
                self.undo()
            return
        with self._lock:  # threads may call models for the first time at once
            if module not in self._seen:
                self.add(module)

    def add(self, module: Any) -> None:
        """Annotate a module that is called for the first time, if it is large."""
        self._seen.add(module)
        is_large = sum(parameter.numel() for parameter in module.parameters()) >= SMALL
        if os.getpid() != self._process or not (is_large or len(find_blocks(Submodule("", module))) > 1):
            return
        model = unwrapped(module)
        self._seen.add(model)
        name = free_name(class_name(model), self.handles)
        try:
            if model not in self._parts:  # else a part of a model that was annotated before, called by itself
                self.annotate(model, name)
            if self._began:
                self._loop.add(model)
            else:
                self._began = True
                self._loop.begin(model)
        except Exception as error:
            self._has_failed = True
            self._say(f"could not annotate {name}: {error}")

    def annotate(self, model: nn.Module, name: str) -> None:
        """Annotate a model and say so, unless the program has."""
        inside = set(map(id, model.modules())) - {id(model)}
        for inner in [inner for inner, handle in self.handles.items() if id(handle._owner()) in inside]:
            self.handles.pop(inner).remove()  # it turns out to be a part of this one, which is annotated as a whole
        if is_ranged(model):
            self._say(f"{name} is already annotated by the program; nothing to do")
            self._loop.leave(Category.PHASE)  # and its phases are the program's
            return
        handle = annotate_under(name, model) if self.handles else annotate_model(model, steps=False)
        self.handles[name] = handle
        self._parts.update(model.modules())
        self._calls_since = 0
        blocks = {path for path in handle.paths if layer_index(path) != -1 and path.rpartition(".")[2].isdecimal()}
        text = f"annotated {name}: {len(handle.paths)} modules"
        text += f", {len(blocks)} blocks among them" if blocks else ""
        if handle.skipped:
            path, reason = next(iter(handle.skipped.items()))
            text += f"; without {len(handle.skipped)}, as {path}: {reason}"
        self._say(text)

    def report(self) -> None:
        """Report at exit which modules had no ranges."""
        if os.getpid() != self._process:
            return
        is_first = self._is_first and "torch.distributed.run" not in sys.modules  # a launcher
        is_annotated = self.handles or self._has_failed or self._began or session.was_annotated
        if not is_annotated and (self._is_called or is_first):
            reason = f"no module of {SMALL} parameters or with repeated blocks was called in this process"
            self._say(f"{reason}; nothing is annotated in it")
        for name, handle in self.handles.items():
            inside, never = handle.inside_compiled, handle.never_entered()
            if inside:
                self._say(
                    f"{name}: {len(inside)} modules have no range of their own inside what torch.compile compiled"
                )
            elif never and len(never) < len(handle.paths):
                self._say(f"{name}: {len(never)} of {len(handle.paths)} modules were never called, first {never[0]}")
