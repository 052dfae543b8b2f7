"""The attributes and hooks of PyTorch, to find what a program has changed."""

import sys
from typing import Any

import torch
import torch._dynamo
import torch._inductor.codegen.cpp
import torch._inductor.codegen.wrapper
import torch._inductor.scheduler
import torch.distributed
import torch.nn.parallel
import torch.optim
import torch.profiler
import torch.utils.checkpoint
import torch.utils.data
import torch.utils.flop_counter

Place = tuple[str, str]


def seen() -> dict[Place, Any]:
    """Identities of the attributes of PyTorch's modules and classes, and the number of global hooks of each kind."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch"]
    classes = {
        f"{value.__module__}.{value.__qualname__}": value
        for _, module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("torch")
    }
    found: dict[Place, Any] = {
        (name, attribute): id(value)
        for name, holder in [*modules, *classes.items()]
        for attribute, value in list(vars(holder).items())
        if attribute not in ("__warningregistry__", "next_id")  # the second counts handles of hooks
    }
    for name in ("torch.nn.modules.module", "torch.optim.optimizer"):
        holder = vars(sys.modules[name])
        hooks = {one: held for one, held in holder.items() if one.startswith("_global") and hasattr(held, "__len__")}
        found |= {(name, f"number in {one}"): len(held) for one, held in hooks.items()}
    handler = torch._dynamo.callback_handler
    found["compiler", "callbacks"] = len(handler.start_callbacks), len(handler.end_callbacks)
    settings = getattr(torch.compiler, "config", None)  # newer than PyTorch 2.4
    found["compiler", "cache tag"] = getattr(settings, "cache_key_tag", None)
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # newer than PyTorch 2.4
    found["autograd", "saved tensors"] = top(True) is None
    return found


def changed(before: dict[Place, Any]) -> list[Place]:
    """Attributes that existed before and have changed."""
    now = seen()
    return sorted(place for place in before if now.get(place) != before[place])
