"""PyTorch's built-in annotations of a training loop, as steps and phases."""

from __future__ import annotations

from nvprof_kit.names import Category, parse_range

_LOOP = {
    "Optimizer.step#": ("optimizer", Category.OPTIMIZER),
    "Optimizer.zero_grad#": ("zero_grad", Category.OPTIMIZER),
    "enumerate(DataLoader)#": ("data", Category.DATA),
}


def loop_annotation(name: str) -> tuple[str, str] | None:
    """Text and category of PyTorch's built-in loop annotations and of steps and phases annotated by the user; else
    None.
    """
    for prefix, (text, category) in _LOOP.items():
        if name.startswith(prefix):
            return text, category.value
    plain = parse_range(name)
    return (name, plain.category.value) if plain.category in (Category.STEP, Category.PHASE) else None
