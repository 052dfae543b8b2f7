"""What the entry points lead to: callbacks that a host takes by itself. Importing this imports no host."""

from __future__ import annotations

from typing import Any

from nvprof_kit.integrations._host.guard import warn


def lightning_callbacks() -> list[Any]:
    """The callback of Lightning's `Trainer`, while somebody listens; none otherwise."""
    return _made("LayerCallback")


def fabric_callbacks() -> list[Any]:
    """The callback of Lightning's `Fabric`, while somebody listens; none otherwise."""
    return _made("FabricCallback")


def _made(name: str) -> list[Any]:
    try:
        from nvprof_kit.integrations._host.loop import listens

        if not listens():
            return []
        from nvprof_kit.integrations import lightning

        return [getattr(lightning, name)()]
    except Exception as error:  # whatever is wrong here, the host's run is not
        warn(f"no {name} for Lightning ({type(error).__name__}: {error})")
        return []
