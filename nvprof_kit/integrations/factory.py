"""Functions of the entry points through which frameworks load callbacks. This module imports no framework."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nvprof_kit._instrument.patches import warn


def lightning_callbacks() -> list[Any]:
    """The callback for Lightning's `Trainer` if a tool is attached or a schedule is set, else none."""
    return _made("lightning", "LayerCallback")


def fabric_callbacks() -> list[Any]:
    """The callback for Lightning's `Fabric` if a tool is attached or a schedule is set, else none."""
    return _made("fabric", "FabricCallback")


def _made(module: str, name: str) -> list[Any]:
    try:
        from nvprof_kit.integrations._host import listens

        if not listens():
            return []
        return [getattr(import_module(f"nvprof_kit.integrations.{module}"), name)()]
    except Exception as error:  # the run must not fail
        warn(f"no {name} for Lightning ({type(error).__name__}: {error})")
        return []
