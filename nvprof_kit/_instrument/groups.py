"""The process groups of torch.distributed that this process is a member of, as the text of a mark."""

from __future__ import annotations

import sys
from typing import Any

from nvprof_kit.names import GroupName, groups_text

_UNDESCRIBED = ("", "undefined")


def group_count() -> tuple[int, int]:
    """A number that changes if a group is created or destroyed; zeros without torch.distributed.

    It is compared in each step, so it only reads two lengths.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        world = module._world  # type: ignore[union-attr]
        return len(world.pg_map), world.group_count
    except Exception:  # private to PyTorch, and optional
        return 0, 0


def groups_mark() -> str:
    """The text of the mark that lists the groups of this process; '' without groups, or if this PyTorch differs."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        world = module._world
        groups = [
            GroupName(str(name), _description(group), tuple(sorted(module.get_process_group_ranks(group))))
            for group, name in list(world.pg_names.items())
            if group in world.pg_map
        ]
    except Exception:  # private to PyTorch, and optional
        return ""
    return groups_text(groups)


def _description(group: Any) -> str:
    described = str(getattr(group, "group_desc", "") or "")
    return "" if described in _UNDESCRIBED else described
