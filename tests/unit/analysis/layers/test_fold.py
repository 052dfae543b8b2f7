"""Equal blocks as one row."""

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lane import examples

from nvprof_kit._analysis.layers.fold import fold_ranked, fold_tree
from nvprof_kit._result.column import Column

COLUMNS = ["layer", "phase", "parent", "depth", "calls", "forward_ns", "backward_ns", "recompute_ns", "other_ns"]


def made(*rows: tuple[str, str, int, int]) -> pd.DataFrame:
    """A tree of (layer, parent, forward_ns, backward_ns); times hold those of the rows below, as in a capture."""
    depth: dict[str, int] = {}
    records = []
    for layer, parent, forward, backward in rows:
        depth[layer] = depth[parent] + 1 if parent else 0
        records.append((layer, "", parent, depth[layer], 1, forward, backward, 0, 0))
    tree = pd.DataFrame.from_records(records, columns=COLUMNS)
    tree["total_ns"] = tree["forward_ns"] + tree["backward_ns"]
    zeros = ("forward_comm_ns", "backward_comm_ns", "recompute_comm_ns", "comm_ns", "cpu_ns")
    return tree.assign(**dict.fromkeys(zeros, 0))


def blocks(count: int, forward: dict[int, int] | None = None) -> pd.DataFrame:
    """A model of blocks of 100 ns forward and 200 ns backward, each with an `mlp` of half that."""
    times = [(forward or {}).get(number, 100) for number in range(count)]
    rows = [("model", "", sum(times), 200 * count)]
    for number, time in enumerate(times):
        name = f"model.layers.{number}"
        rows += [(name, "model", time, 200), (f"{name}.mlp", name, 50, 100)]
    return made(*rows)


def told(tree: pd.DataFrame, *columns: str) -> list[tuple[object, ...]]:
    return list(fold_tree(tree, True)[0][["layer", *columns]].itertuples(index=False, name=None))


def test_two_kinds_in_turn_are_two_rows():
    # local and global attention: no block is unlike, and neither median is the other's
    tree = blocks(12, {number: 160 for number in range(1, 12, 2)})
    even, odd = told(tree, "count", "unlike")[1::2]
    assert (even, odd) == (("model.layers.0,2,...,10", 6, ""), ("model.layers.1,3,...,11", 6, "forward +60 %"))


def test_nested_lists_fold_together():
    # four stages of three blocks: 12 blocks of 10 ns
    rows = []
    for stage in range(4):
        rows.append((f"stages.{stage}", "", 30, 0))
        rows += [(f"stages.{stage}.blocks.{block}", f"stages.{stage}", 10, 0) for block in range(3)]
    assert told(made(*rows), "count", "parent", "forward_ns") == [
        ("stages.0-3", 4, "", 120),
        ("stages.0-3.blocks.0-2", 12, "stages.0-3", 120),
    ]


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.booleans()), max_size=20),
    st.sampled_from([True, False, None]),
)
def test_no_row_and_no_nanosecond_is_lost(times, folds):
    rows = []
    for number, (forward, backward, has_part) in enumerate(times):
        rows.append((f"h.{number}", "", forward, backward))
        if has_part:
            rows.append((f"h.{number}.mlp", f"h.{number}", forward, 0))
    tree = made(*rows)
    folded, groups = fold_tree(tree, folds)
    assert folded["count"].sum() == len(tree)
    assert sorted(row for group in groups for row in group.rows) == [*range(len(tree))]
    for column in ("calls", "forward_ns", "backward_ns", "total_ns"):
        for depth in (0, 1):
            kept, all_of_it = (one[one["depth"] == depth][column].sum() for one in (folded, tree))
            assert kept == all_of_it


def test_ranked_lists_in_lists_fold_by_place_unless_the_places_are_alike():
    # experts cost the same; of each decoder block, layer.0 is self-attention, layer.1 cross-attention
    expert = [{"layer": f"layers.{one}.experts.{two}", "gpu_ns": 100 + one} for one in range(4) for two in range(3)]
    decoder = [{"layer": f"block.{one}.layer.{two}", "gpu_ns": (600, 200)[two]} for one in range(4) for two in range(2)]
    columns = {"gpu_ns": Column("time", "ns")}
    folded = fold_ranked(pd.DataFrame([*expert, *decoder]), columns, "gpu_ns", True)["layer"].tolist()
    assert folded == ["block.0-3.layer.0 x4", "layers.0-3.experts.0-2 x12", "block.0-3.layer.1 x4"]
