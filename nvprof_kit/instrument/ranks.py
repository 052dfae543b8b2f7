"""Which rank this process is, and the folder that no other rank writes to."""

from __future__ import annotations

import os
import sys
from typing import Any

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Set by torchrun, mpirun and srun; Slurm's last, since a batch script has it too, and so what mpirun starts there."""

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""The same of the number of ranks."""


def rank() -> int:
    """The rank by torch.distributed where it is initialised, else by the launcher's environment, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return _told(_RANKS, 0)


def world_size() -> int:
    """The number of ranks by torch.distributed where it is initialised, else by the launcher's environment, else 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return _told(_SIZES, 1)


def _told(variables: tuple[str, ...], otherwise: int) -> int:
    return next((int(value) for value in map(os.environ.get, variables) if value and value.isdecimal()), otherwise)


def rank_folder(mesh: Any = None) -> str:
    """Name of this rank's folder: ``rank3_dp1_tp1_pp0``.

    Args:
        mesh: A ``DeviceMesh`` whose dimensions are named: ``tp`` and ``pp`` are themselves, all others are data
            parallel. Without one the ranks differ in ``dp`` only.
    """
    number = rank()
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if not names or mesh.get_coordinate() is None:
        return f"rank{number}_dp{number}_tp0_pp0"
    places = dict(zip(names, zip(mesh.get_coordinate(), mesh.shape, strict=True), strict=True))
    data = 0
    for name, (place, size) in places.items():
        if name not in ("tp", "pp"):
            data = data * size + place
    return f"rank{number}_dp{data}_tp{places.get('tp', (0, 1))[0]}_pp{places.get('pp', (0, 1))[0]}"


def mesh_of(model: Any) -> Any:
    """The ``DeviceMesh`` that some parameter of a model is spread over, None where none is."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return next((mesh for mesh in meshes if mesh is not None), None)
