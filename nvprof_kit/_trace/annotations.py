"""PyTorch's built-in annotations of a training loop, as steps and phases."""

from __future__ import annotations

import re

from nvprof_kit.names import Category, parse_range

_LOOP = {
    "Optimizer.step#": ("optimizer", Category.OPTIMIZER),
    "Optimizer.zero_grad#": ("zero_grad", Category.OPTIMIZER),
    "enumerate(DataLoader)#": ("data", Category.DATA),
}


_ENGINE_STEP = re.compile(r"execute_(?:\d+_)?(?:context|new)_.+|step\[\w+ bs=.*\]|execute_diffusion_.+")
_GRAPH_CAPTURE = re.compile(r"capture_\d+_\w+")
_MARKED = re.compile(r"## (forward|backward|optimizer|data_load|zero_grad) ##", re.IGNORECASE)


def loop_annotation(name: str) -> tuple[str, str] | None:
    """Text and category of PyTorch's built-in loop annotations, of the steps of vLLM and SGLang, and of steps and
    phases annotated by the user; else None. A step of an engine: ``execute_context_1(888)_generation_0(0)``,
    ``step[EXTEND bs=1 toks=888]``.
    """
    for prefix, (text, category) in _LOOP.items():
        if name.startswith(prefix):
            return text, category.value
    if _ENGINE_STEP.fullmatch(name):
        return name, Category.STEP.value
    if _GRAPH_CAPTURE.fullmatch(name):
        return "graph capture", Category.PHASE.value
    if marked := _MARKED.fullmatch(name):
        return marked[1].lower(), Category.PHASE.value
    plain = parse_range(name)
    return (name, plain.category.value) if plain.category in (Category.STEP, Category.PHASE) else None
