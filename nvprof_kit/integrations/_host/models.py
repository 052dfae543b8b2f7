"""Annotate the models of a framework: a single one by its paths, several each under its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.annotate import annotate_model
from nvprof_kit._instrument.modules.annotate import ModelAnnotation, _by_structure
from nvprof_kit._instrument.modules.blocks import Part


def annotate_models(named: Mapping[str, nn.Module], options: Mapping[str, Any]) -> list[ModelAnnotation]:
    """Annotate models by the prefix of their paths; skips models that the program has annotated.

    Raises:
        UsageError: The options contradict each other.
    """
    return [
        annotate_model(model, **{**options, "steps": False}) if not prefix else annotate_under(prefix, model)
        for prefix, model in named.items()
        if model not in session.annotated and not is_ranged(model)
    ]


def annotate_under(prefix: str, model: nn.Module) -> ModelAnnotation:
    """Annotate a model with a prefix for the paths of its layers, to distinguish several models.

    Raises:
        UsageError: The model is already annotated.
    """
    return ModelAnnotation(model, _by_structure(Part(prefix, model)), backward=True, root=prefix)


def free_name(name: str, taken: Collection[str]) -> str:
    """A name, with a number behind it if others have it: ``Critic``, ``Critic2``."""
    numbered = (name if number == 1 else f"{name}{number}" for number in range(1, len(taken) + 2))
    return next(one for one in numbered if one not in taken)


def is_ranged(model: nn.Module) -> bool:
    """Whether another annotation ranges a module of the model, such as the program's own of a wrapped model."""
    from nvprof_kit._instrument.modules.hooks import annotated

    return any(module in annotated for module in model.modules())
