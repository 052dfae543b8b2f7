"""Writes into the pages what the program itself knows: the help of every verb and the meaning of every column.

    python docs/generate.py        (or: make docs)

Between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->`` a page holds the text called NAME. A test fails while
a page is stale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click

from nvprof_kit.analysis import (
    advise,
    breakdown,
    critical_path,
    diff,
    launching,
    memory,
    memory_segments,
    memory_traffic,
    transfers,
)
from nvprof_kit.analysis.layers import COLUMNS, layers
from nvprof_kit.analysis.metrics import COLUMNS as METRICS_COLUMNS
from nvprof_kit.analysis.ncu_layers import COLUMNS as NCU_COLUMNS
from nvprof_kit.analysis.ncu_plan import COLUMNS as PLAN_COLUMNS
from nvprof_kit.analysis.rules import preset, presets
from nvprof_kit.analysis.timers import COLUMNS as TIMERS_COLUMNS
from nvprof_kit.cli import group
from nvprof_kit.trace.open import open_capture

DOCS = Path(__file__).parent

PROGRAMS = {
    "eager-2023.4": "Llama, eager",
    "llama-2023.4": "Llama, eager, another run",
    "eager-2024.2": "Llama, eager, another machine and nsys 2024.2",
    "checkpoint-2023.4": "activation checkpointing, non-reentrant",
    "checkpoint-reentrant-2023.4": "activation checkpointing, reentrant",
    "graph-2023.4": "the whole step captured in a CUDA graph and replayed",
    "graph-2024.2": "the same, nsys 2024.2",
    "graph-whole-2024.2": "the same, traced as a whole (the default of nsys)",
    "graphed-callables-2024.2": "MLPs by `make_graphed_callables`",
    "compile-blocks-2024.2": "`torch.compile` of each block",
    "inductor-graphs-2024.2": 'of each block, `mode="reduce-overhead"`',
    "compile-model-2024.2": "`torch.compile` of the whole model",
    "ddp-first.rank0-2024.2": "DDP, two GPUs, annotated before it wraps",
    "ddp.rank0-2024.2": "DDP, annotated after",
    "fsdp-first.rank0-2024.2": "FSDP2, two GPUs, annotated before it shards",
    "fsdp.rank0-2024.2": "FSDP2, annotated after",
    "generate-2024.2": "`generate()`, a prefill and seven decode steps",
    "gpt2-2023.4": "GPT-2, eager",
    "encoder-2023.4": "`nn.TransformerEncoder`, eager",
    "pipeline.rank1-2024.2": "pipeline of two stages, the second",
}
"""Captures of docs/attribution.md and what each is of."""

OTHER_MODELS = ("gpt2-2023.4", "encoder-2023.4", "pipeline.rank1-2024.2", "generate-2024.2")
"""Captures of another model than the eager Llama, whose times cannot be compared with it."""


def _memory_columns() -> dict[str, Mapping[str, str]]:
    return {
        "memory": memory.HOLDERS,
        "memory-allocation": memory_traffic.TRAFFIC,
        "memory-step": memory.STEPS,
        "memory-segment": memory_segments.SEGMENTS,
        "memory-leak": memory.LEAKS,
    }


def _breakdown_columns() -> dict[str, Mapping[str, str]]:
    return {
        "breakdown": breakdown.COLUMNS,
        "breakdown-idle": breakdown.IDLE_COLUMNS,
        "breakdown-communication": transfers.COMM_COLUMNS,
        "breakdown-copies": transfers.COPY_COLUMNS,
        "breakdown-launches": launching.LAUNCH_COLUMNS,
        "breakdown-critical-path": critical_path.PATH_COLUMNS,
    }


def texts() -> dict[str, str]:
    """Every generated text by its name."""
    made = {f"help-{verb.replace(' ', '-')}": f"```\n{_help(verb)}\n```" for verb in _verbs()}
    for verb, columns in {
        "layers": COLUMNS,
        "timers": TIMERS_COLUMNS,
        "ncu-plan": PLAN_COLUMNS,
        "ncu-layers": NCU_COLUMNS,
        "metrics": METRICS_COLUMNS,
        **_memory_columns(),
        **_breakdown_columns(),
        "advise": advise.COLUMNS,
        "diff": diff.COLUMNS,
        "diff-kernels": diff.KERNEL_COLUMNS,
    }.items():
        rows = [f"| `{name}` | {meaning} |" for name, meaning in columns.items()]
        made[f"columns-{verb}"] = "\n".join(["| column | meaning |", "|---|---|", *rows])
    made["attribution-programs"] = attribution_programs()
    made["presets"] = _presets()
    return made


def _presets() -> str:
    """The presets for foreign ranges: whose they are, the domain they read, and where that program names them."""
    lines = ["| `--rules` | program | domain | its ranges are named in |", "|---|---|---|---|"]
    for name in presets():
        found = preset(name)
        lines.append(f"| `{name}` | {found.title} | {found.domain or 'default'} | {'<br>'.join(found.sources)} |")
    return "\n".join(lines)


def attribution_programs() -> str:
    """How well attribution holds: a row for each committed capture of the same model, run in another way."""
    eager = _second_block("eager-2023.4").once
    lines = [
        "| program | in a layer | layer 1 forward | recompute | backward | beside eager |",
        "|---|---|---|---|---|---|",
    ]
    for capture, what in PROGRAMS.items():
        found = _second_block(capture)
        beside = f"{found.once / eager:.2f}" if found.once and capture not in OTHER_MODELS else ""
        forward, recompute, backward = (f"{ms:.3f}" if ms else "" for ms in found.milliseconds)
        lines.append(f"| {what} | {found.in_a_layer:.1%} | {forward} | {recompute} | {backward} | {beside} |")
    return "\n".join(lines)


class _Block(NamedTuple):
    """One capture's share of time in layers, and its second block's forward, recompute and backward in ms per step."""

    in_a_layer: float
    milliseconds: tuple[float, float, float]

    @property
    def once(self) -> float:
        """Forward and backward, without what was computed again."""
        return self.milliseconds[0] + self.milliseconds[2]


def _second_block(capture: str) -> _Block:
    path = DOCS.parent / "tests" / "data" / f"{capture}.sqlite.xz"
    result = layers(open_capture(path))
    blocks = result.tree[result.tree["layer"].str.contains(r"(?:layers|h)\.1$")]
    times = (0.0, 0.0, 0.0)
    if len(blocks):
        per_step = 1e6 * max(result.summary.steps, 1)
        forward, recompute, backward = (blocks.iloc[0][f"{phase}_ns"] for phase in ("forward", "recompute", "backward"))
        times = (forward / per_step, recompute / per_step, backward / per_step)
    return _Block(result.summary.loop_layer_share, times)


def _verbs() -> list[str]:
    """Every verb, and behind one that has verbs of its own these: ``ncu``, ``ncu plan``."""
    return [
        name
        for verb, command in group.commands.items()
        for name in (verb, *(f"{verb} {sub}" for sub in _subverbs(command)))
    ]


def _subverbs(command: click.Command) -> list[str]:
    return list(command.commands) if isinstance(command, click.Group) else []


def _help(verb: str) -> str:
    context = group.make_context("nvprof-kit", [], resilient_parsing=True, terminal_width=100)
    command: click.Command = group
    for word in verb.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    return command.get_help(context)


def filled(page: str) -> str:
    """A page with its generated texts as they are now."""
    for name, text in texts().items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        page = re.sub(pattern, lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)
    return page


def main() -> None:
    """Bring every page up to date."""
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
