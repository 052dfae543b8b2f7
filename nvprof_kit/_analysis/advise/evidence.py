"""The data that the rules of `advise` examine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import Int64Array, union_lengths
from nvprof_kit._analysis.attribution.steps import (
    ALL_STEPS,
    StepChoice,
    StepOptions,
    choose_steps,
    devices_of,
    median_place,
)
from nvprof_kit._analysis.breakdown.breakdown import Breakdown, breakdown_of
from nvprof_kit._analysis.kernels.classes import CLASSES, Rule
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd


_OF_TRAINING = ("backward", "recompute", "optimizer")
_TRAINING_KERNELS = re.compile(r"backward|_bwd|bwd_|multi_tensor_apply|adam", re.IGNORECASE)
_EVALUATES = re.compile(r"^(eval|valid|test)", re.IGNORECASE)
_SEQUENCES = re.compile(r"context_(\d+)\(\d+.*?generation_(\d+)\(")
"""vLLM's range of a step: how many sequences it prefills, and how many it decodes."""
_EXPERTS = re.compile(r"expert|(^|\.|_)moe|MoE|router", re.IGNORECASE)
_CAPTURES = re.compile(r"StreamBeginCapture|StreamEndCapture|GraphInstantiate")
POINTWISE = tuple(list(CLASSES).index(name) for name in ("elementwise", "norm", "reduction", "copy", "softmax"))
SCORES_PART = 0.25
"""Kernels that take this part of a layer's softmax work on the scores too, and not on the activations."""

ALIKE, ALIKE_NS = 0.98, 0.9
STALL_OF_STEP = 0.1
FEW_TOKENS_NS = 2_500
"""The median elementwise or norm kernel of a decoding step, which has few tokens, is shorter; of a prefill longer."""


class RankVerdict(Protocol):
    """Which rank of a job the others wait for, if any: a `nvprof_kit._ranks.verdict.Verdict`."""

    @property
    def rank(self) -> int | None:
        """The late rank; None if there is none."""

    @property
    def layer(self) -> str | None:
        """The layer in which it loses the time; None if it is not a single layer."""

    @property
    def phase(self) -> str | None:
        """The phase in which it loses the time."""

    @property
    def cause(self) -> str:
        """Why it is late."""

    @property
    def severity(self) -> str:
        """``none``, ``warning`` or ``critical``."""

    @property
    def cost_ns_per_step(self) -> int:
        """Waiting time that it costs each other rank, in ns per step."""

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""


class Evidence(Operations):
    """A capture and what was derived from it; what several rules need is computed once.

    Args:
        trace: The capture, with `nvprof_kit._analysis.breakdown.breakdown.OPTIONAL`.
        own_rules: Rules for kernel classes, tried before the package's.
        steps: Which steps to look at, by default all but warm-up.
        operations: The same operations, if their owners and classes are already known.
        verdict: The verdict on the captures of all ranks.
        times: The result of `nvprof_kit._analysis.breakdown.breakdown.breakdown` for these steps, if known.
    """

    def __init__(
        self,
        trace: Trace,
        own_rules: Sequence[Rule] = (),
        steps: StepOptions = ALL_STEPS,
        operations: Operations | None = None,
        verdict: RankVerdict | None = None,
        *,
        times: Breakdown | None = None,
    ) -> None:
        super().__init__(trace, own_rules, operations)
        self._steps, self._late, self._times = steps, verdict, times

    @property
    def waited_ns(self) -> int:
        """How long a rank waits for the slowest one in these steps; 0 without a verdict that names one."""
        named = self._late is not None and self._late.rank is not None
        return self._late.cost_ns_per_step * max(self.choice.count, 1) if named and self._late is not None else 0

    @cached_property
    def choice(self) -> StepChoice:
        """The steps to look at: those requested, or all but warm-up."""
        return choose_steps(self.trace, self.attribution, self._steps)

    @cached_property
    def times(self) -> Breakdown:
        """Where the time goes."""
        if self._times is not None:
            return self._times
        return breakdown_of(self.trace, self.attribution, self.classes, self.choice)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The rows of the steps, without warm-up; all of the capture if it has no steps."""
        rows = self.times.steps
        inside: pd.DataFrame = rows[np.append(self.choice.shown, False)[self.times.instances]]
        return inside if len(inside) else rows

    @cached_property
    def wall_ns(self) -> int:
        """Wall time of the steps and of the waits for data between them, summed over devices; never 0."""
        return max(int(self.steps["wall_ns"].sum()) + self.loading_ns - self.idle_ns("dataloader"), 1)

    @cached_property
    def loading_ns(self) -> int:
        """Idle time inside the data loader's ranges, in the steps and between them: loops wait in either place."""
        rows = self.times.steps
        return int(rows["idle_dataloader_ns"][(self.times.instances < 0) | rows.index.isin(self.steps.index)].sum())

    @cached_property
    def inside(self) -> npt.NDArray[np.bool_]:
        """Which operations belong to these steps; all of them if the capture has no steps, shape ``(n,)``."""
        return self.choice.of_ops(self.attribution)

    @cached_property
    def steps_are_alike(self) -> bool:
        """Whether all steps run nearly as many operations for nearly as long: only a disturbed host tells their times
        apart.
        """
        ops_of_step = np.bincount(self.attribution.step[self.inside] + 1)[1:]
        ops_of_step = ops_of_step[ops_of_step > 0]
        compute_ns = self.steps["compute_ns"].groupby([self.steps["process"], self.steps["device"]])
        return bool(
            len(ops_of_step)
            and ops_of_step.min() >= ALIKE * ops_of_step.max()
            and (compute_ns.min() >= ALIKE_NS * compute_ns.max()).all()
        )

    @cached_property
    def ops(self) -> pd.DataFrame:
        """A row per operation: layer, phase, code (of its kernel class), kind, start_ns, end_ns, ns."""
        import pandas as pd

        layer, phase = op_owners(self.attribution)
        start, end = self.trace.ops["start_ns"].to_numpy(), self.trace.ops["end_ns"].to_numpy()
        ops: pd.DataFrame = pd.DataFrame(
            {
                "layer": layer,
                "phase": phase,
                "code": self.classes.code,
                "kind": self.trace.ops["kind"].to_numpy(),
                "start_ns": start,
                "end_ns": end,
                "ns": end - start,
            },
            copy=False,
        )
        return ops

    @cached_property
    def program(self) -> str:
        """What the program does in these steps: ``training``, ``graph capture``, ``evaluation``, ``prefill``,
        ``decode`` or ``mixed`` (prefill and decode).
        """
        if (
            self.ops["phase"][self.inside].isin(_OF_TRAINING).any()
            or self.classes.is_a("optimizer")[self.inside].any()
            or self.among(self.trace.ops["name"], _TRAINING_KERNELS)[self.inside].any()
        ):
            return "training"
        if self.captures_graphs:
            return "graph capture"
        phases = self.ops["phase"][self.inside]
        if self.among(phases, _EVALUATES).mean() > 0.5:
            return "evaluation"
        named = [match.groups() for name in self.attribution.ranges.names if (match := _SEQUENCES.search(name.text))]
        prefills, decodes = (any(group[index] != "0" for group in named) for index in (0, 1))
        if not named:  # a step has few tokens if its light kernels are short
            light = self.classes.is_a("elementwise") | self.classes.is_a("norm")
            light &= self.inside & (self.ops["kind"] == OP_KINDS.index("kernel")).to_numpy()
            median = self.ops["ns"][light].groupby(self.attribution.step[light]).median()
            share_of_few = float((median < FEW_TOKENS_NS).mean()) if len(median) else 0.0
            decodes, prefills = share_of_few >= 0.2, share_of_few <= 0.8
        return "mixed" if prefills and decodes else "decode" if decodes else "prefill"

    @cached_property
    def score_kernels(self) -> Int64Array:
        """Operations that work on the scores of attention that is not fused: softmax, scale, mask, dropout and casts
        between two products of a layer, rows of `ops`.
        """
        ops = self.ops
        rows = np.flatnonzero((ops["kind"] == OP_KINDS.index("kernel")).to_numpy() & self.inside)
        table = ops.iloc[rows][["layer", "phase", "ns"]].astype({"layer": str, "phase": str})
        for name in ("softmax", "gemm", "attention"):
            table[name] = self.classes.is_a(name)[rows]
        table["light_ns"] = table["ns"].where(np.isin(ops["code"].to_numpy()[rows], POINTWISE))
        table["softmax_ns"] = table["ns"].where(table["softmax"])
        places = table.groupby(["layer", "phase"])
        sums = places[["softmax", "gemm", "attention"]].transform("sum")
        # each softmax has a product before and one after it, and takes longer than what works on the activations;
        # that of a router does not
        least_ns = places["softmax_ns"].transform("median")
        eager = (sums["softmax"] > 0) & (sums["attention"] == 0) & (sums["gemm"] >= 2 * sums["softmax"])
        eager &= (table["layer"] != NO_LAYER) & (least_ns >= 2 * FEW_TOKENS_NS)
        eager &= least_ns >= places["light_ns"].transform("median")
        chosen = eager & (table["light_ns"] >= SCORES_PART * least_ns)
        layers = table["layer"][eager & table["softmax"]].nunique()
        score_rows: Int64Array = rows[chosen.to_numpy()] if layers >= 2 else rows[:0]
        return score_rows

    @cached_property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered and gradients scattered, as FSDP and ZeRO do."""
        collectives = set(self.times.communication["collective"])
        return {"AllGather", "ReduceScatter"} <= collectives

    @cached_property
    def captures_graphs(self) -> bool:
        """Whether most of the steps' launches are put into CUDA graphs instead of being run."""
        calls, nodes = self.trace.calls, self.trace.graph_nodes
        if calls is None or not self.among(calls["name"], _CAPTURES).any():
            return False
        replayed = (self.trace.ops["graph_node"].to_numpy() >= 0) | (self.ops["kind"] == OP_KINDS.index("graph"))
        launched = int((~replayed & self.inside).sum())
        captured = int((nodes["original"] < 0).sum())
        return captured > launched and not bool((replayed & self.inside).any())

    @cached_property
    def around_copies(self) -> pd.DataFrame:
        """The idle gaps outside layers in which the host works on what a copy through pageable memory brought it, or
        prepares what one takes away; rows of `nvprof_kit._analysis.breakdown.breakdown.Breakdown.gaps`.
        """
        gaps, names = self.times.gaps, self.trace.ops["name"]
        copies = (self.trace.ops["host_memory"] == "pageable").to_numpy() & self.inside
        start, end = self.ops["start_ns"], self.ops["end_ns"]
        beside = gaps["start_ns"].isin(end[copies & (names == "memcpy DtoH").to_numpy()])
        beside |= (gaps["start_ns"] + gaps["idle_ns"]).isin(start[copies & (names == "memcpy HtoD").to_numpy()])
        works = gaps["cause"].isin(("unknown", "after_sync", "sync", "off_cpu", "python"))
        gaps_at_copies: pd.DataFrame = gaps[
            beside & works & (gaps["layer"] == NO_LAYER) & gaps["window"].isin(self.steps.index)
        ]
        return gaps_at_copies

    @cached_property
    def stalls(self) -> pd.DataFrame:
        """The idle gaps of a tenth of the median step or more in which what the host did is unknown: it was busy with
        something else than launching; columns of `nvprof_kit._analysis.breakdown.breakdown.Breakdown.gaps`.
        """
        gaps, wall = self.times.gaps, self.steps["wall_ns"].to_numpy()
        long = gaps["idle_ns"] >= STALL_OF_STEP * int(wall[median_place(wall)]) if self.choice.count else False
        stalls: pd.DataFrame = gaps[long & (gaps["cause"] == "unknown") & gaps["window"].isin(self.steps.index)]
        stalls = stalls.drop(self.around_copies.index, errors="ignore")
        return stalls

    @cached_property
    def captures_in_steps(self) -> bool:
        """Whether a CUDA graph is captured in these steps."""
        calls, steps = self.trace.calls, self.steps
        if calls is None or not self.choice.count:
            return False
        starts = calls["start_ns"].to_numpy()[self.among(calls["name"], _CAPTURES)]
        step_starts, end = steps["start_ns"].to_numpy(), (steps["start_ns"] + steps["wall_ns"]).to_numpy()
        return bool(((starts[:, None] >= step_starts) & (starts[:, None] < end)).any())

    @cached_property
    def replays_graphs(self) -> bool:
        """Whether these steps replay CUDA graphs."""
        replayed = (self.trace.ops["graph_node"].to_numpy() >= 0) | (self.ops["kind"] == OP_KINDS.index("graph"))
        return bool((replayed & self.inside).any())

    @cached_property
    def has_experts(self) -> bool:
        """Whether the model has layers of experts."""
        layers = self.ops["layer"].cat.categories[self.ops["layer"].cat.codes[self.inside].unique()]
        return bool(self.classes.is_a("experts")[self.inside].any()) or any(
            _EXPERTS.search(str(layer)) for layer in layers
        )

    @property
    def has_stacks(self) -> bool:
        """Whether Python's calls were recorded, which slows the host."""
        return self.trace.frames is not None and len(self.trace.frames) > 0

    @staticmethod
    def among(names: pd.Series[str], pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
        """Which of these categorical names contain a pattern."""
        matches = np.array([*(bool(pattern.search(str(name))) for name in names.cat.categories), False])
        matching: npt.NDArray[np.bool_] = matches[names.cat.codes.to_numpy()]
        return matching

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs, counted once per process that uses them."""
        return max(len(self.times.steps[["process", "device"]].drop_duplicates()), 1)

    @property
    def steps_and_gpus(self) -> int:
        """Times are sums over so many steps of GPUs; over as many GPUs without steps."""
        return max(self.choice.count, 1) * self.gpus

    @property
    def per_step(self) -> str:
        """`` per step`` to append to a number, '' if the capture has no steps."""
        return " per step" if self.choice.count else ""

    def ms(self, ns: float) -> str:
        """A sum over the steps and GPUs as text, per step and GPU."""
        return ms(ns / self.steps_and_gpus)

    def idle(self, *causes: str) -> pd.DataFrame:
        """Idle time of these causes by place, largest first."""
        rows = self.times.idle
        idle: pd.DataFrame = rows[rows["cause"].isin(causes)]
        return idle

    def idle_ns(self, *causes: str) -> int:
        """Idle time of these causes in the steps."""
        return int(sum(self.steps[f"idle_{cause}_ns"].sum() for cause in causes))

    def busy_ns(self, rows: Int64Array) -> int:
        """Wall time in which any of these operations runs, summed over devices: the most that their removal saves."""
        start, end = (self.ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
        lane = devices_of(self.trace)[1][rows]
        return int(union_lengths(start, end, lane, np.zeros(len(rows), dtype=np.int64), 1)[0])

    def longest(self, rows: Int64Array) -> tuple[int, int]:
        """Start and end of the longest of these operations."""
        row = rows[np.argmax(self.ops["ns"].to_numpy()[rows])]
        return int(self.ops["start_ns"].iloc[row]), int(self.ops["end_ns"].iloc[row])


def ms(ns: float) -> str:
    """A time as text."""
    return f"{ns / 1e6:.3f} ms"


def share(value: float, total: float) -> str:
    """A share as text."""
    return f"{100 * value / max(total, 1):.1f} %"
