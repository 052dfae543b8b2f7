"""Functions of the entry points through which frameworks load callbacks. This module imports no framework."""

from __future__ import annotations

from typing import Any

from nvprof_kit.integrations._host.guard import warn


def lightning_callbacks() -> list[Any]:
    """The callback for Lightning's `Trainer` if a tool is attached or a schedule is set, else none."""
    return _made("LayerCallback")


def fabric_callbacks() -> list[Any]:
    """The callback for Lightning's `Fabric` if a tool is attached or a schedule is set, else none."""
    return _made("FabricCallback")


def _made(name: str) -> list[Any]:
    try:
        from nvprof_kit.integrations._host.loop import listens

        if not listens():
            return []
        from nvprof_kit.integrations import lightning

        return [getattr(lightning, name)()]
    except Exception as error:  # the run must not fail
        warn(f"no {name} for Lightning ({type(error).__name__}: {error})")
        return []
