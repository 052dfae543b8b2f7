"""How a kernel was launched, grid, block, registers and shared memory, as items of the `SELECT` of operations."""

from __future__ import annotations

from collections.abc import Collection

from nvprof_kit.trace.sqlite import Database

_SOURCES = {
    "mangled": ("mangledName",),
    "grid_x": ("gridX",),
    "grid_y": ("gridY",),
    "grid_z": ("gridZ",),
    "block_x": ("blockX",),
    "block_y": ("blockY",),
    "block_z": ("blockZ",),
    "registers": ("registersPerThread",),
    "shared_bytes": ("staticSharedMemory", "dynamicSharedMemory"),
}

CONFIG_COLUMNS = tuple(_SOURCES)
"""The optional columns of `nvprof_kit.trace.schema.OPS` that this file reads."""


def config_items(db: Database, table: str, optional: Collection[str]) -> list[str]:
    """Items of a SELECT for those of `CONFIG_COLUMNS` that are wanted; a column the table lacks is -1."""
    return [
        f"{' + '.join(columns)} AS {name}" if db.has(table, *columns) else f"-1 AS {name}"
        for name, columns in _SOURCES.items()
        if name in optional
    ]
