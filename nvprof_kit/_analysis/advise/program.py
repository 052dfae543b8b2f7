"""The picture of a program that the rules of `advise` look at, and how a finding is made from a part of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.advise.findings import finding_of, ms, share
from nvprof_kit._analysis.advise.replay import FILLS, MOVES, READS, SCATTERS, WRITES, ZEROES, Replay, matching
from nvprof_kit._analysis.attribution.attribution import Operations, attributed
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, as_slice, exact_sums, joined, union_lengths
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions, choose_steps, devices_of
from nvprof_kit._analysis.breakdown.breakdown import Breakdown, breakdown_of
from nvprof_kit._analysis.breakdown.host import OTHER_CAUSES, HostCalls, host_of
from nvprof_kit._findings import Finding
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.joins import distinct
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    from nvprof_kit._analysis.flops.flops import Flops

POINTWISE = ("elementwise", "norm", "reduction", "copy", "softmax")
"""Classes of kernels whose time is that of reading and writing memory."""

FEW_TOKENS_NS = 2_500
"""The median elementwise or norm kernel of a decoding step, which has few tokens, is shorter; of a prefill longer."""

NARROW_TILE, LARGE_TILE = 32, 128
"""cuBLAS and CUTLASS take a tile with such sides for a product of about as many rows and columns, or more; one with a
narrow side for a product of few rows.
"""

LITTLE, CONTRADICTED = 10, 0.5
"""Without steps, fewer operations tell nothing surely; nor do steps of which more than this part contradict what their
light kernels tell.
"""

SHORT_NS = 3_000
"""A kernel that does the work of several takes less time than they by so much for each."""

CHAIN_LENGTH, PAST_TIMES, IN_BLOCKS, RECURRING_SHARE = 4, 4, 4, 0.1
"""In decoding, light kernels on new tokens take less than `PAST_TIMES` as long as the usual one, on a cache or weights
longer. A kernel that `IN_BLOCKS` nodes of a CUDA graph run is taken for one of its blocks. Outside layers, how often
those kernels of a chain recur that take `RECURRING_SHARE` of the costliest one's time is how many turns a loop has.
"""

MASK_PART = 0.25
"""Kernels in a row of which those that make a mask take this part are there for it."""

TURNS, CHECKED, STALL_OF_STEP = 0.25, 0.1, 0.05
"""If `TURNS` of the waits of a place are followed by one in another call, they are of one loop. More than `CHECKED`
waits for each operation of the backward pass are of anomaly detection, about 0.2, as it checks each gradient by two
kernels and a copy; in the forward pass it records where each was called. A gap of `STALL_OF_STEP` of the median step,
in which what the host did is unknown, is no late launch but a stall.
"""

WORTH_A_NOTE = 0.8
"""A note says why a saving shrinks to less than this part; disturbed steps shrink it only if they do so."""

STEPS_TO_JUDGE, SIBLINGS = 4, 4
"""So many steps, or equal layers, tell what is usual."""

OP_COLUMNS = ["kind", "name", "stream", "start_ns", "end_ns", "host_memory", "graph_node"]

MANY_PARAMETERS = re.compile("multi_tensor_apply")

BLOCK = r"^((?:.*?\.)??\d+)(?=\.|$)"
"""The block of a layer: its path up to the first number."""
DOUBLE = re.compile(r"lambda\(double\)|<(?:\(int\)\d+, )?double\b|dgemm|d884gemm|gemm_f64")
"""In names of kernels whose elements are of double precision."""
_TILE = re.compile(r"^(?!.*(?:fprop|conv)).*?(?:_|tilesize|MT)(\d+)x(\d+)")
"""The first ``NxM`` of a product's name, but not of a convolution's, nor the shape of an instruction."""
_CAT = re.compile("CatArray")
_SORTS = re.compile(r"sort|topk|index_and_segment", re.IGNORECASE)
"""Kernels that sort rows, as of all logits to draw from the most likely ones, or find their largest values: in passes.
"""
FUSED = re.compile("^triton_(poi|red|per|tem|for)")
"""Kernels of torch.compile, which has fused what it can."""
_KERNEL_LAUNCH = re.compile("Launch(Cooperative)?Kernel")
_MASKS = re.compile(r"triu|tril|masked_fill|where_kernel")
_TRAINING_KERNELS = re.compile(r"backward|_bwd|bwd_|multi_tensor_apply|adam", re.IGNORECASE)
_WITH_GRADIENTS = re.compile("RegisterPostBackward|NoopSaveInputs")
"""What FSDP and activation checkpointing run in a forward pass that a backward pass will follow."""
_EVALUATION = re.compile(r"^(eval|valid|test)", re.IGNORECASE)
_SEQUENCES = re.compile(r"context_(\d+)\(\d+.*?generation_(\d+)\(")
"""vLLM's range of a step: how many sequences it prefills, and how many it decodes."""
_CAPTURE_CALLS = re.compile(r"StreamBeginCapture|StreamEndCapture|GraphInstantiate")


class Program(Operations):
    """What a program does in the steps to look at: its operations, the gaps between them, and the host's waits.

    Args:
        operations: The operations of a capture, with what a breakdown reads.
        steps: Which steps to look at, by default all but warm-up.
        times: The breakdown of these steps, if known.
        waited_ns: How long a step of this rank waits for the slowest rank, if known.
        limits: The operations of the same steps, if they were counted.

    Attributes:
        choice: The steps to look at.
        times: Where their time goes.
        steps: A row per step and GPU, without warm-up; of all of the capture if it has no steps.
        loading_ns: Idle time inside the data loader's ranges, in the steps and between them.
        wall_ns: Wall time of the steps and of the waits for data between them, summed over GPUs; never 0.
        gpus: Number of GPUs, counted once per process that uses them.
        parts: Times are sums over so many steps of GPUs; over as many GPUs without steps.
        per_step: `` per step`` to append to a time, '' without steps.
        on_average: `` on average`` to append to such a time beside a single one, '' if there are no several.
        waited_ns: Waits for the slowest rank in these steps.
    """

    def __init__(
        self,
        operations: Operations,
        steps: StepOptions = ALL_STEPS,
        *,
        times: Breakdown | None = None,
        waited_ns: int = 0,
        limits: Flops | None = None,
    ) -> None:
        super().__init__(operations.trace, operations=operations)
        self.choice = choose_steps(self.trace, self.attribution, steps)
        self.times = times or breakdown_of(
            self.trace, self.attribution, self.classes, self.choice, self.host, is_full=False
        )
        rows = self.times.steps
        is_step = np.append(self.choice.shown, False)[self.times.instances]
        self.steps = rows[is_step] if is_step.any() else rows
        in_data = (self.times.instances < 0) | rows.index.isin(self.steps.index)
        self.loading_ns = int(rows["idle_dataloader_ns"][in_data].sum())
        self.wall_ns = max(int(self.steps["wall_ns"].sum()) + self.loading_ns - self.idle_ns("dataloader"), 1)
        self.gpus = max(len(rows[["process", "device"]].drop_duplicates()), 1)
        self.parts = max(self.choice.count, 1) * self.gpus
        self.per_step = " per step" if self.choice.count else ""
        self.on_average = " on average" * (self.parts > 1)
        self.waited_ns = waited_ns * max(self.choice.count, 1)
        self.limits = limits

    @cached_property
    def host(self) -> HostCalls:
        """The calls of the capture."""
        return host_of(self)

    @cached_property
    def ops(self) -> pd.DataFrame:
        """The operations of these steps, indexed as `Trace.ops`, with owners and class, and `ns`, `layer_kind`
        (`kinds` of its layer), `block` (its layer up to the number), `block_kind` (that before it), `lane` (the
        device), and `call_of_layer` (a range).
        """
        inside = as_slice(np.flatnonzero(self.choice.of_ops(self.attribution)))
        ops: pd.DataFrame = attributed(self, self.trace.ops[OP_COLUMNS]).iloc[inside]
        layers = ops["layer"].cat
        names = layers.categories.to_series()
        kind_of, block_of = kinds(names), names.astype(str).str.extract(BLOCK, expand=False).fillna("")
        return ops.assign(
            ns=ops["end_ns"] - ops["start_ns"],
            layer_kind=labels(layers.codes.to_numpy(), kind_of.tolist()),
            block_kind=labels(layers.codes.to_numpy(), kind_of.str.split("*").str[0].tolist()),
            block=labels(layers.codes.to_numpy(), block_of.tolist()),
            lane=pd.Series(devices_of(self.trace)[1][inside], ops.index, copy=False),
            call_of_layer=pd.Series(self.attribution.layer_range[inside], ops.index, copy=False),
        )

    @cached_property
    def by_start(self) -> npt.NDArray[np.int32]:
        """The positions of `ops` GPU by GPU, by their start."""
        return np.lexsort((self.ops["start_ns"], self.ops["lane"])).astype(np.int32)

    @property
    def steps_of_lanes(self) -> list[pd.DataFrame]:
        """The rows of `Breakdown.steps` of each GPU of a process."""
        steps = self.times.steps
        return [
            steps[(steps["process"] == gpu.process) & (steps["device"] == gpu.device)]
            for gpu in devices_of(self.trace)[0]
        ]

    @cached_property
    def replays(self) -> list[tuple[Replay, pd.Index[int]]]:
        """The steps without the profiler: of each GPU of a process, with its windows."""
        host, replays, _ = self.host, [], self.capture_starts
        del host.tid  # of large captures, much memory, as below
        self.forget(calls=["tid"], ops=["bytes"])
        self.return_memory()
        for lane, of_lane in enumerate(self.steps_of_lanes):
            rows = self.by_start[self.ops["lane"].to_numpy()[self.by_start] == lane]
            if (host.of_op[self.ops.index[rows].to_numpy()] < 0).all():
                continue
            skipped = of_lane[of_lane["step"].notna() & ~of_lane.index.isin(self.steps.index)].sort_values("start_ns")
            start_ns = skipped["start_ns"].to_numpy()
            intervals = start_ns, start_ns + skipped["wall_ns"].to_numpy()
            replay = Replay(host, self.ops, rows, intervals)
            if replay.count:
                replays.append((replay, of_lane.index))
        del host, self.host
        if self.is_last_question:
            vars(self.trace).pop("launching_calls", None)
        self.forget(calls=["start_ns", "end_ns", "kind"])
        self.return_memory()
        return replays

    def saved_ns(
        self, waits: pd.DataFrame, gaps: pd.DataFrame, left: pd.DataFrame | None = None, *, with_checks: bool = False
    ) -> int:
        """By how much the steps would be shorter, both without the profiler, if the host did not wait in these rows of
        `waits`, and did nothing in these rows of `gaps`; with what computes the numbers that it waits for, or not.

        Args:
            waits: The waits that vanish.
            gaps: The gaps.
            left: What part of some operations is left: of their time on the GPU (`gpu`), and of the host's to launch
                them (`host`), indexed as `ops`.
            with_checks: Whether what computes the numbers vanishes too.
        """
        saved_ns = 0.0
        for replay, windows in self.replays:
            of_host = gaps[gaps["window"].isin(windows)].sort_values("start_ns")
            start_ns = of_host["start_ns"].to_numpy()
            intervals = start_ns, start_ns + of_host["idle_ns"].to_numpy()
            parts = None if left is None else (left.index.to_numpy(), [left["gpu"].to_numpy(), left["host"].to_numpy()])
            saved_ns += replay.saved_ns(waits["row"].to_numpy(), intervals, parts, with_checks=with_checks)
        return round(saved_ns)

    def without_ns(
        self, ops: pd.DataFrame, gpu: Any = 0.0, host: Any = 0.0, *, gaps: pd.DataFrame | None = None
    ) -> int:
        """By how much the steps would be shorter, both without the profiler, if of the time of these operations on the
        GPU, and of the host's time to launch them, these parts were left, and the host did nothing in these gaps.
        """
        gaps = self.times.gaps[:0] if gaps is None else gaps
        if not self.replays:
            part = 1 - np.average(np.broadcast_to(gpu, len(ops)), weights=ops["ns"]) if ops["ns"].any() else 0.0
            return int(self.busy_ns(ops) * part + gaps["idle_ns"].sum())
        left = pd.DataFrame({"gpu": gpu, "host": host}, ops.index)
        return self.saved_ns(self.waits[:0], gaps, left)

    def allocating_ns(self) -> int:
        """By how much the steps would be shorter, both without the profiler, if nothing was allocated and freed."""
        if not self.replays:
            return self.idle_ns("allocation")
        return round(sum(replay.saved_ns(replay.allocations, replay.allocating) for replay, _ in self.replays))

    def wait_ns(self, waits: pd.DataFrame, *, with_checks: bool = False, is_loop: bool = False) -> int:
        """What these rows of `waits` cost without the profiler, and without what else keeps the host, and a disturbed
        host; with what computes the numbers that it waits for, or not, or with all of the loop that they are in. Where
        that checks the operations of the backward pass, the late launches of the forward pass are gone too.
        """
        gaps, others = self.times.gaps, self._gaps_of_others[0]
        is_without = np.zeros(len(gaps), dtype=bool)
        is_without[others.index] = is_without[self.gaps_between(waits).index] = True
        if with_checks and not is_loop and self.is_checked(waits):
            is_late = matching(gaps["cause"], {"launch"}) & matching(gaps["phase"], {"forward", "recompute"})
            is_without[self.gaps(is_late).index] = True
        left = None
        if is_loop:
            of_gpus = [
                self.left_of_loop(waits[waits["window"].isin(windows)], replay) for replay, windows in self.replays
            ]
            left = pd.concat([left for left, _ in of_gpus])
            waits = pd.DataFrame({"row": np.concatenate([waits["row"], *(within for _, within in of_gpus)])})
        saved_ns = self.saved_ns(waits, gaps[is_without], left, with_checks=with_checks) - self._gaps_of_others[1]
        return int(saved_ns * self.undisturbed)

    def is_checked(self, waits: pd.DataFrame) -> bool:
        """Whether these rows of `waits` check the operations of the backward pass, as anomaly detection does."""
        return bool((waits["phase"] == "backward").sum() > CHECKED * (self.ops["phase"] == "backward").sum())

    def left_of_loop(self, waits: pd.DataFrame, replay: Replay) -> tuple[pd.DataFrame, npt.NDArray[np.int32]]:
        """What is left, as `saved_ns` takes it, if a loop with these waits on a GPU is done for all at once: one launch
        of many, and of short kernels little; and all calls that wait in it. It holds what runs between the waits, or
        all of their layers, backward too.
        """
        ops = self.ops[["start_ns", "ns", "layer", "phase", "graph_node"]].loc[np.flatnonzero(replay.position >= 0)]
        run = (~self.waits["follows"]).cumsum().shift(fill_value=0).loc[waits.index].to_numpy()
        is_last, end = np.append(run[1:] != run[:-1], True)[: len(run)], waits["start_ns"] + waits["idle_ns"]
        loops = waits["start_ns"].to_numpy()[np.append(True, is_last[:-1])[: len(run)]], end.to_numpy()[is_last]
        row = np.searchsorted(loops[0], ops["start_ns"], side="right") - 1
        is_there = (row >= 0) & (ops["start_ns"] < np.append(loops[1], 0)[row]) & ops["phase"].isin(waits["phase"])
        is_there = np.where(ops["layer"] == NO_LAYER, is_there, ops["layer"].isin(waits["layer"]))
        body, left = ops[is_there & (ops["graph_node"] < 0)], is_last.mean() if len(run) else 1.0
        gpu = (1 - SHORT_NS / body["ns"].clip(lower=1)).clip(lower=left)
        return pd.DataFrame({"gpu": gpu, "host": left}, body.index), replay.waits_within(loops)

    @cached_property
    def _gaps_of_others(self) -> tuple[pd.DataFrame, int]:
        """The gaps of `OTHER_CAUSES`, and by how much the steps would be shorter without them."""
        others = self.gaps(matching(self.times.gaps["cause"], OTHER_CAUSES))
        return others, self.saved_ns(self.waits[:0], others)

    def launched_late_ns(self) -> int:
        """How long the GPUs would idle without the profiler if the host never waited for them: it launches late, or is
        busy with something else.
        """
        idle_ns = sum(replay.length_ns - replay.gpu_ns for replay, _ in self.replays)
        return round(idle_ns) - self.saved_ns(self.times.waits, self.gaps_between(self.waits))

    @cached_property
    def undisturbed(self) -> float:
        """The part of what waits cost that is not of a disturbed host: all, unless the steps wait more than twice as
        long as those that wait least.
        """
        causes = ("launch", "unknown", "sync", "after_sync")
        late_ns = self.steps[[f"idle_{cause}_ns" for cause in causes]].sum(axis=1)
        return min(2 * self.steady_ns(late_ns) / max(int(late_ns.sum()), 1), 1.0)

    @cached_property
    def on_past(self) -> npt.NDArray[np.bool_]:
        """Which of `ops` take too long to work on the new tokens of a decoding step alone, if they are light."""
        light_ns = self.ops["ns"][matching(self.ops["kernel_class"], ("elementwise", "norm"))]
        return np.asarray(self.ops["ns"] > PAST_TIMES * max(FEW_TOKENS_NS, light_ns.median()))

    @cached_property
    def is_pass(self) -> npt.NDArray[np.bool_]:
        """Which of `ops`, if they are light, pass over weights or a cache in decoding: those `on_past` of blocks, if
        there are such in most calls of their layer, not in a prefill alone, and those of several nodes of one CUDA
        graph. A sampler passes over the logits once a token.
        """
        if self.mode != "decode":
            return np.zeros(len(self.ops), dtype=bool)
        of_past = self.ops[self.on_past & ((self.ops["graph_node"] >= 0) | (self.ops["block"] != ""))]
        is_node = of_past["graph_node"] >= 0
        nodes, others = of_past[is_node], of_past[~is_node]
        graph = nodes["graph_node"].to_numpy() >> 32  # CUPTI has the graph's number in these bits
        in_graph = nodes.groupby(["lane", graph, "name"], observed=True)["graph_node"].transform("nunique")
        calls = self.ops.groupby("layer", observed=True)["call_of_layer"].nunique()
        times = others.groupby(["layer", "name"], observed=True)["ns"].transform("size")
        is_usual = 2 * times >= others["layer"].map(calls).astype(np.int64)
        return self.ops.index.isin(nodes.index[in_graph >= IN_BLOCKS].union(others.index[is_usual]))

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """The kernels among `ops`."""
        is_kernel = (self.ops["kind"] == OP_KINDS.index("kernel")).to_numpy()
        count = int(np.count_nonzero(is_kernel))
        # most captures have them before all others: then they are no copy
        return self.ops.iloc[:count] if is_kernel[:count].all() else self.ops[is_kernel]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The operations that fused attention does without: softmax, scale, mask, dropout and casts of the scores
        between two products, copies of what these read and write; and the products, of which it leaves `gpu`.
        """
        is_move = (self.ops["kind"] == OP_KINDS.index("kernel")) | matching(self.ops["name"], MOVES)
        with_softmax = {*self.ops["layer"][self.ops["kernel_class"] == "softmax"].unique()} - {NO_LAYER}
        ops = self.ops[is_move & matching(self.ops["layer"], with_softmax)]
        place = ops.groupby(["layer", "phase"], observed=True).ngroup().to_numpy()
        # each softmax has a product before and one after it
        softmaxes, products, fused = (
            np.bincount(place, ops["kernel_class"] == name)[place] for name in ("softmax", "gemm", "attention")
        )
        unfused = (softmaxes > 0) & (fused == 0) & (products >= 2 * softmaxes)
        ops, place = ops[unfused], place[unfused]
        is_softmax, is_light = ops["kernel_class"] == "softmax", matching(ops["kernel_class"], POINTWISE)
        light_ns = ops["ns"][is_light].groupby(place[is_light]).median().reindex(place).to_numpy()
        softmaxes = ops[is_softmax]  # all replays of a graph are of one call
        replays = (
            softmaxes.groupby(["lane", "graph_node"])["ns"].transform("size").where(softmaxes["graph_node"] >= 0, 1)
        )
        of_call = (softmaxes["ns"] / replays).groupby([place[is_softmax], softmaxes["call_of_layer"]]).sum()
        softmax_ns = of_call.groupby(level=0).median().reindex(place).to_numpy()
        # and takes longer than what works on the activations, if need be head by head; that of a router does not
        ops = ops[(softmax_ns >= 2 * FEW_TOKENS_NS) & (softmax_ns >= light_ns)]
        if ops["layer"].nunique() < 2:
            ops = ops[:0]
        ops = ops.iloc[_in_streams(ops)]
        kernel_class, number = ops["kernel_class"], np.arange(len(ops))
        is_product = (kernel_class == "gemm").to_numpy()
        turn = np.cumsum(is_product)  # from each product to the next
        has_softmax = np.append(np.bincount(turn, kernel_class == "softmax", turn.max(initial=0) + 1) > 0, False)
        is_first, is_second = is_product & has_softmax[turn], is_product & has_softmax[turn - 1]
        is_copy = ((kernel_class == "copy") & ~matching(ops["name"], _CAT)).to_numpy()
        before = np.maximum.accumulate(np.where(is_copy, -1, number))
        after = np.minimum.accumulate(np.where(is_copy, len(ops), number)[::-1])[::-1]
        is_operand = is_copy & (np.append(is_second, False)[before] | np.append(is_first, False)[after])
        is_score = (has_softmax[turn] & matching(kernel_class, POINTWISE)) | is_operand
        if self.may_decode:
            is_first = is_second = is_first & False
        is_half = is_first | is_second
        scores: pd.DataFrame = ops.assign(gpu=0.5 * is_half)[is_score | is_half]
        return scores

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The kernels and copies on the GPU of which two or more in a row each pass over memory, or one that `is_pass`,
        in one call of a layer or outside layers and the optimizer: their `row` in `ops`, `call_of_layer`, `run`, its
        `length`, whether it has `only_copies`, and whether it `makes_mask`: a notable part of it does, in a call that
        then runs fused attention.
        """
        ops = self.ops
        order = _in_streams(ops).astype(np.int32)  # half the memory
        order = order[~matching(ops["name"], ZEROES)[order]]  # they zero what the next kernel counts in
        is_light = matching(ops["kernel_class"], POINTWISE) & (ops["kind"] == OP_KINDS.index("kernel"))
        is_light |= matching(ops["name"], MOVES)
        is_light |= matching(ops["name"], _SORTS) & (ops["layer"] == NO_LAYER) & (ops["kernel_class"] == "other")
        if len(self.scores):  # fused attention has none
            is_light &= ~np.isin(ops.index, self.scores.index)
        is_light &= ~(matching(ops["name"], DOUBLE) | self.pads)  # in another dtype there are others
        is_light &= (ops["layer"] != NO_LAYER) | (
            (ops["phase"] != "optimizer") & ~matching(ops["name"], MANY_PARAMETERS)
        )
        positions = np.flatnonzero(np.asarray(is_light)[order])
        is_part = np.ones(len(positions), dtype=bool)
        for is_last in (False, True):
            positions = positions[is_part]
            row, is_start = order[positions], np.diff(positions, prepend=-2) != 1
            for name in ("lane", "stream", "call_of_layer"):
                is_start[1:] |= np.diff(ops[name].to_numpy()[row]) != 0
            run = is_start.cumsum(dtype=np.int32)
            if not is_last:  # a move that takes longer than the kernels of its run is no part of it
                ns, is_move = ops["ns"].to_numpy()[row], matching(ops["name"], MOVES)[row]
                is_part = ~is_move | (ns <= np.bincount(run, ns * ~is_move)[run])
                if is_part.all():
                    break
        length = np.bincount(run).astype(np.int32)[run]
        is_run = (length >= 2) | self.is_pass[row]
        row, run, length = (column[is_run] for column in (row, run, length))
        call, ns, start_ns = (ops[name].to_numpy()[row] for name in ("call_of_layer", "ns", "start_ns"))
        is_mask = matching(ops["name"], _MASKS)[row]
        masks_ns, all_ns = (exact_sums(run[of], ns[of], len(positions) + 1) for of in (is_mask, slice(None)))
        makes_mask = (masks_ns >= MASK_PART * np.maximum(all_ns, 1))[run]
        fused = ops[(ops["kernel_class"] == "attention") & (ops["layer"] != NO_LAYER)]
        fused_ns = fused.groupby("call_of_layer")["start_ns"].max().reindex(call[makes_mask]).to_numpy()
        makes_mask[makes_mask] = start_ns[makes_mask] < fused_ns
        behind = order[np.minimum(positions[is_run] + 1, len(order) - 1)]  # also what makes one right before attention
        makes_mask |= is_mask & np.asarray(ops["kernel_class"] == "attention")[behind] & (call != NONE)
        only_copies = np.bincount(run, (ops["kernel_class"] == "copy").to_numpy()[row])[run] == length
        columns = {"row": row, "call_of_layer": call, "run": run, "length": length}
        return pd.DataFrame({**columns, "only_copies": only_copies, "makes_mask": makes_mask}, copy=False)

    @cached_property
    def pads(self) -> npt.NDArray[np.bool_]:
        """Which of `ops` pad tensors in the forward pass of a block: they fill one, and write some of its rows."""
        fills, writes = (matching(self.ops["name"], like)[self.by_start] for like in (FILLS, SCATTERS))
        first = np.flatnonzero(fills[:-1] & writes[1:])
        is_pad = np.isin(np.arange(len(fills)), self.by_start[np.append(first, first + 1)])
        return is_pad & matching(self.ops["phase"], {"forward"}) & (self.ops["block"] != "").to_numpy()

    @cached_property
    def mask_kernels(self) -> pd.DataFrame:
        """The `runs` that make a mask, as rows of `ops`."""
        return self.ops.iloc[self.runs["row"][self.runs["makes_mask"]]]

    @cached_property
    def chains(self) -> pd.DataFrame:
        """The `runs` of `CHAIN_LENGTH` or more, and shorter ones in the same calls; not those that make masks, or only
        copy. In decoding, one kernel that `is_pass` is enough, unless those of its run only copy.

        If each is fused, `left` is what part of a kernel's time is left, and `launched` of its launches. Of those that
        pass over weights or a cache nothing is left. Others take what the longest of them does, or those of
        torch.compile, which are fused and stay; outside layers that, on average, for each turn of a loop, in which all
        names that take long recur, but the time of a launch for the first turn only.
        """
        runs, _ = self.runs, self.mask_kernels
        del self.runs  # to limit memory
        is_copy = np.asarray(self.ops["kernel_class"] == "copy")
        is_pass, is_copy = (mask[runs["row"]] for mask in (self.is_pass, is_copy))
        computes = np.bincount(runs["run"], is_pass & ~is_copy)[runs["run"]] > 0
        is_chain = ~runs["makes_mask"] & (computes | ~is_pass)
        is_pass &= computes
        is_long = is_chain & ((runs["length"] >= CHAIN_LENGTH) | is_pass)
        calls = runs["call_of_layer"][is_long & (runs["call_of_layer"] != NONE)].unique()
        is_chain &= (is_long | runs["call_of_layer"].isin(calls)) & ~runs["only_copies"]
        chains = runs.loc[is_chain, ["row", "run", "length"]]
        ops, is_pass = self.ops[["name", "layer", "ns"]].iloc[chains["row"]], is_pass[is_chain]
        del runs
        run, name = distinct(chains["run"].to_numpy(np.int64))[1], ops["name"].cat.codes.to_numpy(np.int64)
        of_name = distinct(run.astype(np.int64) * (name.max(initial=0) + 1) + name)[1]
        all_ns, is_fused = ops["ns"].to_numpy(), matching(ops["name"], FUSED)
        times, name_ns = np.bincount(of_name, minlength=1)[of_name], np.bincount(of_name, all_ns, 1)[of_name]
        turns, costliest_ns = np.full(run.max(initial=-1) + 1, len(chains)), np.zeros(run.max(initial=-1) + 1)
        np.maximum.at(costliest_ns, run, name_ns)
        times = np.where((ops["layer"] == NO_LAYER).to_numpy(), times, 1)
        np.minimum.at(turns, run, np.where(name_ns >= RECURRING_SHARE * costliest_ns[run], times, len(chains)))
        passes = 1 + (turns[run] - 1) * (1 - SHORT_NS / all_ns.clip(min=SHORT_NS))
        ns, longest_ns = np.where(is_pass, 0, np.where(turns[run] > 1, name_ns / times, all_ns)), np.zeros(len(turns))
        np.maximum.at(longest_ns, run, ns.astype(float))  # of two types it takes eight times as long
        np.maximum(longest_ns, np.bincount(run, np.where(is_fused, ns, 0), len(turns)), out=longest_ns)
        part = longest_ns / np.bincount(run, ns, len(turns)).clip(min=1)
        left = np.where(is_pass, 0, np.minimum(passes * part[run], 1))
        launched = np.bincount(run, is_fused, len(turns))[run].clip(min=1) / chains["length"].to_numpy()
        self.return_memory()
        return chains.reset_index(drop=True).assign(is_pass=is_pass, left=left, launched=np.where(is_pass, 0, launched))

    def gaps(self, is_chosen: npt.NDArray[np.bool_] | pd.Series[bool]) -> pd.DataFrame:
        """Those of `nvprof_kit._analysis.breakdown.breakdown.Breakdown.gaps` that are in these steps and chosen."""
        is_step = np.append(self.times.steps.index.isin(self.steps.index), False)
        rows = np.flatnonzero(is_chosen)
        gaps: pd.DataFrame = self.times.gaps.iloc[rows[is_step[self.times.gaps["window"].to_numpy()[rows]]]]
        return gaps

    @cached_property
    def gaps_at_copies(self) -> pd.DataFrame:
        """The gaps outside layers in which the host works on what a copy through pageable memory brought it, or
        prepares what one takes away; and those between two such copies of a step that are longer than all operations
        between the copies, as where a loop copies number after number.
        """
        all_gaps = self.gaps(self.times.gaps["layer"] == NO_LAYER)
        all_copies, of_gpus = self.ops[self.ops["host_memory"] == "pageable"], []
        at_work = ["unknown", "after_sync", "sync", "off_cpu", "python"]
        for lane, of_lane in enumerate(self.steps_of_lanes) if len(all_copies) else ():
            copies = all_copies[all_copies["lane"] == lane]
            gaps = all_gaps[all_gaps["window"].isin(of_lane.index)]
            beside = gaps["start_ns"].isin(copies["end_ns"][matching(copies["name"], READS)])
            beside |= (gaps["start_ns"] + gaps["idle_ns"]).isin(copies["start_ns"][matching(copies["name"], WRITES)])
            works, ends = beside & matching(gaps["cause"], at_work), np.sort(copies["end_ns"])
            before = np.searchsorted(ends, gaps["start_ns"], side="right") - 1
            is_between = (
                (before >= 0)
                & (before + 1 < len(ends))
                & matching(gaps["cause"], [*at_work, "launch", "copy", "queued"])
            )
            if is_between.any():
                ops = self.ops[["end_ns", "ns"]][self.ops["lane"] == lane]
                ended = np.searchsorted(ends, ops["end_ns"])  # before how many of the copies
                work_ns = np.cumsum(exact_sums(ended, ops["ns"].to_numpy(), len(ends) + 1))
                step = np.searchsorted(np.sort(of_lane["start_ns"]), ends, side="right")
                after, idle_ns = np.minimum(before + 1, len(ends) - 1), gaps["idle_ns"]
                works |= is_between & (step[before] == step[after]) & (work_ns[after] - work_ns[before] <= idle_ns)
            of_gpus += gaps.index[works].tolist()
        return all_gaps[all_gaps.index.isin(of_gpus)]

    @cached_property
    def stalls(self) -> pd.DataFrame:
        """The long gaps in which what the host did is unknown, and the five times longer ones outside layers and calls:
        it was busy with something else than launching, as with an optimizer on the CPU.
        """
        usual_ns = self.steps["wall_ns"].quantile(0.5, interpolation="lower") if self.choice.count else np.inf
        stalls = self.gaps(self.times.gaps["idle_ns"] >= STALL_OF_STEP * usual_ns)
        is_outside = (stalls["cause"] == "launch") & (stalls["layer"] == NO_LAYER) & (stalls["call"] == "")
        is_outside &= stalls["idle_ns"] >= 5 * STALL_OF_STEP * usual_ns
        stalls = stalls[is_outside | (stalls["cause"] == "unknown")]
        return stalls[~np.isin(stalls.index, self.gaps_at_copies.index)]

    def steady_ns(self, late_ns: pd.Series[int]) -> int:
        """What the steps would wait if each waited as little as those that wait least: as the least of steps that run
        equally many operations, so that only a disturbed host tells them apart; else as a quarter of them. The first
        step does not count among many: what came before it may lie outside the capture.

        Args:
            late_ns: What each of `steps` waits.
        """
        rows, total_ns = self.steps, 0
        quantile = 0.05 if self.steps_are_alike else 0.25
        for _, of_gpu in late_ns.reindex(rows.index, fill_value=0).groupby([rows["process"], rows["device"]]):
            compared = of_gpu.iloc[1:] if len(of_gpu) >= STEPS_TO_JUDGE else of_gpu
            total_ns += int(compared.quantile(quantile, interpolation="lower")) * len(of_gpu)
        return total_ns

    @cached_property
    def waiting_launches(self) -> pd.DataFrame:
        """Those of `Breakdown.waits` that are launches of kernels; see `HostCalls.launched`."""
        return self.times.waits[matching(self.times.waits["call"], _KERNEL_LAUNCH)]

    @cached_property
    def waits(self) -> pd.DataFrame:
        """The host's waits for the GPU, as `Breakdown.waits`, but those at copies and launches, GPU by GPU in time;
        `window`; `follows`: whether the next wait is at the same place, with nothing but work of that place between
        them; and `by_call`: the call, of loops in which several take turns the first one.
        """
        gaps, ops = self.times.gaps, self.ops[["start_ns", "layer", "phase"]].sort_values("start_ns", kind="stable")
        waits = self.times.waits.drop(self.waiting_launches.index)
        waits = waits[~waits["gap"].isin(self.gaps_at_copies.index)]
        waits = waits.astype({"layer": str, "phase": str, "call": str})
        of_gap = {name: gaps[name].to_numpy()[waits["gap"]] for name in ("start_ns", "idle_ns", "window")}
        rows = waits.assign(**of_gap).sort_values("gap", kind="stable")
        if not (len(rows) and len(ops)):
            return rows.assign(follows=False, by_call=rows["call"])
        first = np.searchsorted(ops["start_ns"], rows["start_ns"] + rows["idle_ns"])  # operation after the gap
        last = np.append(np.searchsorted(ops["start_ns"], rows["start_ns"])[1:], 0) - 1  # before that of the next wait
        keys, number = ["layer", "phase"], [ops[name].cat.codes.to_numpy() for name in ("layer", "phase")]
        run = np.cumsum(np.append(0, np.any(np.diff(number) != 0, axis=0)))  # of operations of one place
        follows = (rows[[*keys, "window"]] == rows[[*keys, "window"]].shift(-1)).all(axis=1) & (first <= last)
        first = np.minimum(first, len(ops) - 1)
        follows &= (ops[keys].iloc[first].astype(str).to_numpy() == rows[keys].to_numpy()).all(axis=1)
        follows &= run[first] == run[last]
        alternates = follows & (rows["call"] != rows["call"].shift(-1))
        turns = alternates.groupby([rows[key] for key in keys]).transform("mean")
        first_call = rows.groupby(keys)["call"].transform("first")
        return rows.assign(follows=follows, by_call=rows["call"].where(turns < TURNS, first_call))

    def gaps_between(self, waits: pd.DataFrame) -> pd.DataFrame:
        """The gaps from each of these rows of `waits` until the next wait, if that follows."""
        is_chosen = (self.waits["follows"] & self.waits.index.isin(waits.index)).to_numpy()
        gaps = self.times.gaps
        if not is_chosen.any():
            return gaps[:0]
        last = np.searchsorted(self.waits["gap"], np.arange(len(gaps)), side="right") - 1
        return gaps[np.append(is_chosen, False)[last]]

    @property
    def is_little(self) -> bool:
        """Whether hardly anything ran."""
        return not self.choice.count and len(self.ops) < LITTLE

    @property
    def has_stacks(self) -> bool:
        """Whether Python's stacks were recorded, which slows the host."""
        return self.trace.frames is not None and len(self.trace.frames) > 0

    @cached_property
    def mode(self) -> str:
        """What the program does in these steps: ``training``, ``graph capture``, ``evaluation``, ``prefill``,
        ``decode``, ``mixed`` (prefill and decode), or ``unknown``: too little ran, or no light kernels, or these are
        short, as of few tokens, beside products mostly in large tiles, as of many.
        """
        ops, phases = self.ops, self.ops["phase"]
        trains = matching(phases, ("backward", "recompute", "optimizer")) | (ops["kernel_class"] == "optimizer")
        texts = [name.text for name in self.attribution.ranges.names]
        if (trains | matching(ops["name"], _TRAINING_KERNELS)).any() or any(map(_WITH_GRADIENTS.search, texts)):
            return "training"
        if self.captures_graphs:
            return "graph capture"
        if 2 * np.count_nonzero(matching(phases, _EVALUATION)) > len(phases):
            return "evaluation"
        named = [match.groups() for text in texts if (match := _SEQUENCES.search(text))]
        prefills, decodes = (any(group[index] != "0" for group in named) for index in (0, 1))
        if not named:  # a step has few tokens if its light kernels are short
            kernels = self.kernels[["step", "name", "kernel_class", "ns"]]
            light = kernels[matching(kernels["kernel_class"], ("elementwise", "norm"))]
            products = kernels[matching(kernels["kernel_class"], {"gemm"})]
            side, light_ns = smallest_side(products["name"]), light.groupby("step", dropna=False)["ns"].median()
            mostly_in = [
                products["ns"].where(is_in, -products["ns"]).groupby(products["step"], dropna=False).sum() > 0
                for is_in in (side >= LARGE_TILE, side <= NARROW_TILE)
            ]
            is_many, is_narrow = (steps.reindex(light_ns.index, fill_value=False) for steps in mostly_in)
            is_few = light_ns < np.where(is_narrow, 2, 1) * FEW_TOKENS_NS
            if self.is_little or not len(light) or (is_few & is_many).mean() > CONTRADICTED:
                return "unknown"
            decodes, prefills = is_few.mean() >= 0.2, is_few.mean() <= 0.8
        return "mixed" if prefills and decodes else "decode" if decodes else "prefill"

    @property
    def may_decode(self) -> bool:
        """Whether steps may be of new tokens alone."""
        return self.mode in ("decode", "mixed", "unknown")

    @cached_property
    def replays_graphs(self) -> bool:
        """Whether these steps replay CUDA graphs."""
        return bool(((self.ops["graph_node"] >= 0) | (self.ops["kind"] == OP_KINDS.index("graph"))).any())

    @cached_property
    def capture_starts(self) -> npt.NDArray[np.int64]:
        """When CUDA graphs are captured."""
        calls = self.trace.calls
        starts = () if calls is None else calls["start_ns"].to_numpy()[matching(calls["name"], _CAPTURE_CALLS)]
        return np.asarray(starts, dtype=np.int64)

    @property
    def captures_graphs(self) -> bool:
        """Whether most launches of these steps are put into CUDA graphs instead of being run."""
        if not len(self.capture_starts) or self.replays_graphs:
            return False
        return int((self.trace.graph_nodes["original"] < 0).sum()) > len(self.ops)

    @property
    def captures_in_steps(self) -> bool:
        """Whether a CUDA graph is captured within a step."""
        starts, steps = self.capture_starts[:, None], self.steps
        ends = (steps["start_ns"] + steps["wall_ns"]).to_numpy()
        return bool(self.choice.count and ((starts >= steps["start_ns"].to_numpy()) & (starts < ends)).any())

    @cached_property
    def steps_are_alike(self) -> bool:
        """Whether all steps run nearly as many operations for nearly as long: only a disturbed host tells their times
        apart.
        """
        steps = np.asarray(self.ops["step"].dropna(), dtype=np.int64)
        ops_of_step = np.bincount(distinct(steps)[1])
        compute_ns = self.steps.groupby(["process", "device"])["compute_ns"]
        is_even = len(ops_of_step) and ops_of_step.min() >= 0.98 * ops_of_step.max()
        return bool(is_even and (compute_ns.min() >= 0.9 * compute_ns.max()).all())

    def idle(self, *causes: str) -> pd.DataFrame:
        """Idle time of these causes by place, the longest first: `Breakdown.idle`."""
        return self.times.idle[self.times.idle["cause"].isin(causes)]

    def idle_ns(self, *causes: str) -> int:
        """Idle time of these causes in the steps."""
        return int(sum(self.steps[f"idle_{cause}_ns"].sum() for cause in causes))

    def busy_ns(self, ops: pd.DataFrame) -> int:
        """Wall time in which any of these operations runs, summed over GPUs: the most that their removal saves."""
        start, end, lane = (ops[name].to_numpy() for name in ("start_ns", "end_ns", "lane"))
        return int(union_lengths(start, end, lane, np.zeros(len(ops), dtype=np.int64), 1)[0])

    def shorter(self, saves: float) -> str:
        """By how much the steps are shorter, or the whole capture."""
        return f"the {'steps are' if self.choice.count else 'capture is'} {self.ms(saves)} shorter{self.per_step}"

    def with_launches(self, ops: pd.DataFrame, saves: float) -> str:
        """What to add to evidence that names the time of operations, if the steps are shorter by more or less."""
        if saves < WORTH_A_NOTE * (busy_ns := self.busy_ns(ops)):
            return "; not all of that is saved: what replaces them takes time too, or the GPU then waits for the host"
        text = f"; with their launches {self.shorter(saves)}"
        text += ", on a host that the recording of Python's stacks slows" * self.has_stacks
        return text * bool(saves > busy_ns)

    def at_most_ns(self, ops: pd.DataFrame) -> float:
        """An upper estimate of what removing these operations saves: their time, and twice their part of the waits for
        launches.
        """
        return float(ops["ns"].sum() + 2 * self.idle_ns("launch", "unknown") * len(ops) / max(len(self.ops), 1))

    def ms(self, ns: float) -> str:
        """A sum over the steps and GPUs as text, per step and GPU."""
        return ms(ns / self.parts)

    def number(self, count: float, noun: str, nouns: str = "") -> str:
        """How many of these there are as text: per step and GPU, or in all steps if that is about one."""
        each, several, steps = count / self.parts, nouns or f"{noun}s", self.choice.count
        if not steps or each >= 1.5 or each == 1:
            digits = 1 if each < 10 and each % 1 else 0
            return f"{each:,.{digits}f} {several if each > 1 else noun}{self.per_step}"
        return f"{count:,.0f} {several if count > 1 else noun} in {steps} steps"

    def of_wall(self, ns: float) -> str:
        """A sum over the steps and GPUs as text, with its share of their time."""
        return f"{self.ms(ns)} of {self.ms(self.wall_ns)}{self.per_step} ({share(ns, self.wall_ns)})"

    def finding_in_ops(
        self, cases: str | list[str], evidence: str, ops: pd.DataFrame, *,
        saves: float | None = None, confidence: str = "medium", symptom_of: str = "", **facts: object,
    ) -> Finding:  # fmt: skip
        """A finding about operations, at the layer and phase with most of their time, which is saved if not given; what
        a host that records Python's stacks could save beyond twice that is of low confidence.
        """
        layer, phase = costliest(ops, "ns")
        is_there = (ops["layer"] == layer) & (ops["phase"] == phase)
        longest = ops.iloc[int(ops["ns"].where(is_there, -1).to_numpy().argmax())]
        if confidence == "medium" and self.has_stacks and saves is not None and saves > 2 * self.busy_ns(ops):
            confidence = "low"
        return finding_of(
            cases, evidence, (layer, phase), (longest["start_ns"], longest["ns"]),
            self.busy_ns(ops) if saves is None else int(saves), confidence=confidence, symptom_of=symptom_of, **facts,
        )  # fmt: skip

    def finding_in_idle(
        self, cases: str | list[str], idle: pd.DataFrame, *,
        note: str = "", saves: float | None = None, confidence: str = "high", **facts: object,
    ) -> Finding:  # fmt: skip
        """A finding about rows of `idle`, at the layer and phase with most of it, which is saved if not given."""
        layer, phase = costliest(idle, "idle_ns")
        rows = at(idle, layer, phase)
        longest = largest(rows, "longest_ns")
        where = ", ".join(name for name in (longest["operator"], longest["call"]) if name)
        evidence = f"{self.of_wall(idle['idle_ns'].sum())} idle; most in {layer} {phase}: "
        evidence += f"{self.ms(rows['idle_ns'].sum())}{self.per_step}{self.on_average}; "
        evidence += f"longest stretch there: {ms(longest['longest_ns'])}{f', in {where}' if where else ''}{note}"
        return finding_of(
            cases, evidence, (layer, phase), (longest["longest_at_ns"], longest["longest_ns"]),
            round(idle["idle_ns"].sum() if saves is None else saves), confidence=confidence, symptom_of="", **facts,
        )  # fmt: skip


def _in_streams(ops: pd.DataFrame) -> Int64Array:
    """The order of operations stream by stream, in each by their start."""
    return np.lexsort((ops["start_ns"], ops["stream"], ops["lane"]))


def kinds(layers: pd.Series[Any]) -> pd.Series[str]:
    """Layers without their numbers: equal for equal layers of different blocks."""
    return layers.astype(str).str.replace(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", regex=True)


def costliest(rows: pd.DataFrame, weight: str) -> tuple[str, str]:
    """The layer and phase with the most of these rows."""
    position = joined([pd.Categorical(rows[name]).codes for name in ("layer", "phase")])
    assert position is not None, "there are few"
    first = int(np.argmax(np.bincount(position, rows[weight])[position]))
    return str(rows["layer"].iloc[first]), str(rows["phase"].iloc[first])


def placed(rows: pd.DataFrame, keys: Sequence[str] = ("layer", "phase")) -> tuple[Int64Array, pd.MultiIndex]:
    """The layer and phase, or what two columns are, of each row: a position in the index of all that there can be."""
    first, second = (pd.Categorical(rows[name]) for name in keys)
    place = np.multiply(first.codes, len(second.categories), dtype=np.int64) + second.codes
    return place, pd.MultiIndex.from_product([first.categories, second.categories], names=[*keys])


def largest(rows: pd.DataFrame, column: str) -> pd.Series[Any]:
    """The first row with the largest value."""
    row: pd.Series[Any] = rows.iloc[int(rows[column].to_numpy().argmax())]
    return row


def at(rows: pd.DataFrame, layer: object, phase: object) -> pd.DataFrame:
    """The rows of a layer and phase."""
    return rows[(rows["layer"] == layer) & (rows["phase"] == phase)]


def smallest_side(names: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """The smaller side of the tiles that these categorical names of products tell; NaN if they do not."""
    sides = pd.Series(names.cat.categories.astype(str)).str.extract(_TILE).astype(float)
    return np.append(sides.min(axis=1), np.nan)[names.cat.codes]
