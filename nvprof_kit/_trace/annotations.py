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
_REQUESTS = re.compile(r"execute_(?:\d+_)?(?:context|new)_(\d+)(?:\(.*\))?_(?:generation|cached)_(\d+).*")
_FORWARD_MODE = re.compile(r"step\[(\w+) .*")
_PHASE_OF_MODE = {"EXTEND": "prefill", "DECODE": "decode", "MIXED": "mixed"}
_GRAPH_CAPTURE = re.compile(r"capture_\d+_\w+")
_PHASE_MARK = re.compile(r"## (forward|backward|optimizer|data_load|zero_grad) ##", re.IGNORECASE)


def loop_annotation(name: str) -> tuple[str, str] | None:
    """Text and category of PyTorch's built-in loop annotations, of the steps of vLLM and SGLang, and of steps and
    phases annotated by the user; else None. A step of an engine: ``execute_context_1(888)_generation_0(0)``,
    ``step[EXTEND bs=1 toks=888]``.
    """
    for prefix, (text, loop_category) in _LOOP.items():
        if name.startswith(prefix):
            return text, loop_category.value
    if _ENGINE_STEP.fullmatch(name):
        return name, Category.STEP.value
    if _GRAPH_CAPTURE.fullmatch(name):
        return "graph capture", Category.PHASE.value
    if match := _PHASE_MARK.fullmatch(name):
        return match[1].lower(), Category.PHASE.value
    category = parse_range(name).category
    return (name, category.value) if category in (Category.STEP, Category.PHASE) else None


def engine_phase(name: str) -> str | None:
    """``prefill``, ``decode`` or ``mixed`` for a step of vLLM or SGLang, by the requests that its annotation counts;
    None for other texts.
    """
    if requests := _REQUESTS.fullmatch(name):
        prefills, decodes = int(requests[1]) > 0, int(requests[2]) > 0
        return "mixed" if prefills and decodes else "prefill" if prefills else "decode"
    mode = _FORWARD_MODE.fullmatch(name)
    return _PHASE_OF_MODE.get(mode[1]) if mode else None
