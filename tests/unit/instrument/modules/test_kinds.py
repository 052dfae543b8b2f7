"""Kinds of blocks: by class, by the list that holds them, by the user's own rules."""

from __future__ import annotations

from torch import nn

from nvprof_kit._instrument.modules.blocks import block_kinds


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(4), nn.Linear(4, 4)


class Sharded:
    """As `torch.distributed.fsdp.FSDPModule`, which fully_shard puts before the class."""


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


def test_two_classes_are_two_kinds() -> None:
    assert set(block_kinds(Video(Other)).values()) == {"Block", "Other"}


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


def test_wrappers_leave_no_trace() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Video(Other)

    assert block_kinds(Wrapper()) == block_kinds(Video(Other))


def test_the_class_that_fully_shard_makes_is_the_users() -> None:
    model = Video(type("FSDPBlock", (Sharded, Block), {}))
    assert block_kinds(model)["temporal_blocks.0"] == "Block in temporal_blocks"


def test_a_model_without_blocks() -> None:
    assert block_kinds(nn.Linear(2, 2)) == {}


def test_a_pattern_of_blocks_does_not_match_their_parts() -> None:
    rules = {"temporal_blocks.*": "temporal", "*.norm": "norm"}
    kinds = block_kinds(Video(Other), rules)
    assert [path for path, kind in kinds.items() if kind == "temporal"] == ["temporal_blocks.0", "temporal_blocks.1"]
    # another pattern still finds the parts
    assert {path for path, kind in kinds.items() if kind == "norm"} == {
        f"{blocks}_blocks.{number}.norm" for blocks in ("spatial", "temporal") for number in (0, 1)
    }


def test_no_pattern_matches_inside_what_it_matches() -> None:
    def of(rules: dict[str, str]) -> set[str]:
        return {path for path, kind in block_kinds(Video(Other), rules).items() if kind == "mine"}

    blocks = {"temporal_blocks.0", "temporal_blocks.1"}
    assert of({"temporal_blocks*": "mine"}) == blocks  # the list itself is never called
    assert of({"temporal_blocks.0": "first", "temporal_blocks.*": "mine"}) == {"temporal_blocks.1"}
    nested = nn.Sequential(Other(), nn.Linear(4, 4))
    nested[0].inner = Other()
    assert {path for path, kind in block_kinds(nested, {"Oth*": "mine"}).items() if kind == "mine"} == {"0"}
