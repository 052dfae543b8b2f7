"""Kinds of blocks: by class, by the list that holds them, by the user's own rules."""

from __future__ import annotations

from torch import nn

from nvprof_kit._instrument.modules.blocks import block_kinds


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(4), nn.Linear(4, 4)


class Other(Block):
    pass


class Video(nn.Module):
    def __init__(self, temporal: type[Block] = Block) -> None:
        super().__init__()
        self.spatial_blocks = nn.ModuleList(Block() for _ in range(2))
        self.temporal_blocks = nn.ModuleList(temporal() for _ in range(2))


def test_one_class_in_two_lists_is_two_kinds() -> None:
    assert block_kinds(Video()) == {
        "spatial_blocks.0": "Block in spatial_blocks",
        "spatial_blocks.1": "Block in spatial_blocks",
        "temporal_blocks.0": "Block in temporal_blocks",
        "temporal_blocks.1": "Block in temporal_blocks",
    }


def test_own_rules_come_first_and_may_name_parts() -> None:
    kinds = block_kinds(Video(Other), {"temporal*.1": "last", "Other": "temporal", "spatial_blocks.*.norm": "norm"})
    assert kinds == {
        "spatial_blocks.0": "Block",
        "spatial_blocks.1": "Block",
        "temporal_blocks.0": "temporal",
        "temporal_blocks.1": "last",
        "spatial_blocks.0.norm": "norm",
        "spatial_blocks.1.norm": "norm",
    }


def test_a_pattern_of_blocks_does_not_match_their_parts() -> None:
    rules = {"temporal_blocks.*": "temporal", "*.norm": "norm"}
    kinds = block_kinds(Video(Other), rules)
    assert [path for path, kind in kinds.items() if kind == "temporal"] == ["temporal_blocks.0", "temporal_blocks.1"]
    # another pattern still finds the parts
    assert {path for path, kind in kinds.items() if kind == "norm"} == {
        f"{blocks}_blocks.{number}.norm" for blocks in ("spatial", "temporal") for number in (0, 1)
    }
