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
    "eager": ("eager-2023.4", "Llama, eager"),
    "llama": ("llama-2023.4", "Llama, eager, another run"),
    "checkpoint": ("checkpoint-2023.4", "activation checkpointing, non-reentrant"),
    "reentrant": ("checkpoint-reentrant-2023.4", "activation checkpointing, reentrant"),
    "graph": ("graph-2023.4", "the whole step captured in a CUDA graph and replayed"),
    "gpt2": ("gpt2-2023.4", "GPT-2, eager"),
    "encoder": ("encoder-2023.4", "`nn.TransformerEncoder`, eager"),
}
"""Capture and description of each program in docs/attribution.md."""

OTHER_MODELS = ("gpt2-2023.4", "encoder-2023.4")
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
        "ncu-layers": NCU_COLUMNS, "metrics": METRICS_COLUMNS,
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
    eager = _second_block(PROGRAMS["eager"][0])
    lines = [
        "| program | in a layer | layer 1 forward | recompute | backward | beside eager |",
        "|---|---|---|---|---|---|",
    ]
    for name, (capture, what) in PROGRAMS.items():
        found = _second_block(capture)
        beside = "" if name == "eager" or not found.same_model else f"{found.once / eager.once:.2f}"
        forward, recompute, backward = (f"{ms:.3f}" if ms else "" for ms in found.milliseconds)
        lines.append(f"| {what} | {found.in_a_layer:.1%} | {forward} | {recompute} | {backward} | {beside} |")
    return "\n".join(lines)


class _Block(NamedTuple):
    """One capture's share of time in layers, and its second block's forward, recompute and backward in ms per step."""

    in_a_layer: float
    milliseconds: tuple[float, float, float]
    same_model: bool

    @property
    def once(self) -> float:
        """Forward and backward, without what was computed again."""
        return self.milliseconds[0] + self.milliseconds[2]


def _second_block(capture: str) -> _Block:
    path = DOCS.parent / "tests" / "data" / f"{capture}.sqlite.xz"
    result = layers(open_capture(path))
    blocks = result.tree[result.tree["layer"].str.contains(r"(?:layers|h)\.1$")].iloc[0]
    times = tuple(
        float(blocks[f"{phase}_ns"]) / 1e6 / result.summary.steps for phase in ("forward", "recompute", "backward")
    )
    return _Block(result.summary.loop_layer_share, times, capture not in OTHER_MODELS)


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
