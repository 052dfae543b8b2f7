"""What the site says that the program itself knows: the help of every verb, the meaning of every column, the API.

A page has ``<!-- NAME -->`` where the text called NAME belongs; docs/hooks.py puts it there when the site is built.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.testing import CliRunner

import nvprof_kit
from nvprof_kit._analysis.advise import comm_rules
from nvprof_kit._analysis.advise.advise import RULES, Rule
from nvprof_kit._analysis.attribution.attribution import OWNER_COLUMNS, Operations
from nvprof_kit._analysis.foreign.rules import preset, presets
from nvprof_kit._analysis.hardware import DTYPES, known_gpus
from nvprof_kit._analysis.kernels.classes import classify
from nvprof_kit._analysis.layers import profile as layer_profile
from nvprof_kit._analysis.layers.layers import COLUMNS, Layers, layers
from nvprof_kit._analysis.layers.sums import MEMORY as LAYER_MEMORY_COLUMNS
from nvprof_kit._analysis.layers.sums import SPLIT_COLUMNS as LAYER_SPLIT_COLUMNS
from nvprof_kit._api.tables import ATTRIBUTED
from nvprof_kit._cli import group
from nvprof_kit._instrument.meters import utilisation
from nvprof_kit._result import formats
from nvprof_kit._result.column import FOLDED, Columns
from nvprof_kit._result.result import Result
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.jobs.schema import TABLES as MAP_TABLES
from nvprof_kit._trace.jobs.schema import VERSION as MAP_VERSION
from nvprof_kit._trace.ncu.schema import KERNELS
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import TABLES as CAPTURE_TABLES
from nvprof_kit._trace.torch_memory.snapshot import TABLES as SNAPSHOT_TABLES

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
import api_page  # noqa: E402  # beside this file

PROGRAMS = {
    "eager-2023.4": "Llama, eager",
    "llama-2023.4": "Llama, eager, another run",
    "eager-2024.2": "Llama, eager, another machine and nsys 2024.2",
    "checkpoint-2023.4": "activation checkpointing, non-reentrant",
    "checkpoint-reentrant-2023.4": "activation checkpointing, reentrant",
    "checkpoint-inside-2024.2": "activation checkpointing inside the block's own forward",
    "graph-2023.4": "the whole step captured in a CUDA graph and replayed",
    "graph-2024.2": "the same, nsys 2024.2",
    "graph-whole-2024.2": "the same, traced as a whole (the default of nsys)",
    "graphed-callables-2024.2": "MLPs by `make_graphed_callables`",
    "compile-blocks-2024.2": "`torch.compile` of each block",
    "inductor-graphs-2024.2": 'of each block, `mode="reduce-overhead"`',
    "compile-blocks-parts-2024.2": "`torch.compile` of each block, `compiled_parts=True`",
    "compile-model-2024.2": "`torch.compile` of the whole model",
    "compile-model-parts-2024.2": "the same, `compiled_parts=True`",
    "compile-graphs-parts-2024.2": 'of the whole model, `mode="reduce-overhead"`, `compiled_parts=True`',
    "ddp-first.rank0-2024.2": "DDP, two GPUs, annotated before it wraps",
    "ddp.rank0-2024.2": "DDP, annotated after",
    "fsdp-first.rank0-2024.2": "FSDP2, two GPUs, annotated before it shards",
    "fsdp.rank0-2024.2": "FSDP2, annotated after",
    "fsdp-keep.rank0-2024.2": "the same, `reshard_after_forward=False`",
    "tensor.rank0-2024.2": "tensor parallel (DTensor), two GPUs, the rank that came last",
    "tensor.rank1-2024.2": "tensor parallel, the rank that waits for it",
    "generate-2024.2": "`generate()`, a prefill and seven decode steps",
    "gpt2-2023.4": "GPT-2, eager",
    "encoder-2023.4": "`nn.TransformerEncoder`, eager",
    "pipeline.rank1-2024.2": "pipeline of two stages, the second",
}
"""Captures of docs/attribution.md and what each is of."""

OTHER_MODELS = ("gpt2-2023.4", "encoder-2023.4", "pipeline.rank1-2024.2", "generate-2024.2")
"""Captures of another model than the eager Llama, whose times cannot be compared with it."""


EXAMPLES = {
    "advise": "advise slow-2024.2.sqlite.xz --top 4",
    "breakdown": "breakdown ddp.rank0-2024.2.sqlite.xz --view steps",
    "layers": "layers flops/llama12-2024.2.sqlite.xz --depth 3",
    "flops": "flops flops/llama12-2024.2.sqlite.xz --depth 4",
    "metrics": "metrics metrics/llama-2023.4.sqlite.xz --depth 2",
    "ncu-layers": "ncu layers ncu/encoder-full-2025.3.csv.xz --capture ncu/encoder-2024.2.sqlite.xz --depth 3",
    "summary": "summary eager-2023.4.sqlite.xz --view kernel --top 6",
    "doctor": "doctor slow-2024.2.sqlite.xz",
    "breakdown-communication": "breakdown kineto/fsdp.rank0.json.xz --view communication --top 8",
    "breakdown-copies": "breakdown slow-2024.2.sqlite.xz --view copies --top 3",
    "breakdown-queue": "breakdown ddp.rank0-2024.2.sqlite.xz --view queue",
    "summary-operator": "summary slow-operators-2024.2.sqlite.xz --view operator --top 10",
    "ranks": "ranks ranks/ranks-ddp-layer.rank0-2024.2.sqlite.xz ranks/ranks-ddp-layer.rank1-2024.2.sqlite.xz --top 5",
    "summary-device": "summary slow-cpu-2024.2.sqlite.xz --view device",
    "tutorial-breakdown": "breakdown slow-cpu-2024.2.sqlite.xz --view steps",
    "tutorial-advise": "advise slow-cpu-2024.2.sqlite.xz --top 2",
    "howto-idle": "breakdown slow-cpu-2024.2.sqlite.xz --view idle --top 5",
    "howto-ranks": "ranks ranks/ddp-layer.rank0-2024.2.sqlite.xz ranks/ddp-layer.rank1-2024.2.sqlite.xz --top 3",
    "howto-diff": "diff eager-2023.4.sqlite.xz checkpoint-2023.4.sqlite.xz --top 8",
    "howto-ncu": "ncu plan ncu/encoder-2024.2.sqlite.xz --share 0.4",
    "howto-memory": "layers memory/caching-2024.2.sqlite.xz --columns memory --depth 2",
}
"""Commands of which a page shows what they print, on committed captures of an H200."""


RESULTS = ("Advice", "Breakdown", "Checks", "Diff", "Flops", "Layers", "Memory", "Metrics", "NcuKernels", "NcuLayers",
           "NcuPlan", "RankTable", "Summary", "Timers")  # fmt: skip
"""The classes of answers."""


WITHOUT_TABLE = ("summary-", "doctor", "ncu-kernels", "timers-calls", "breakdown-steps", "memory-layer", "memory-stack",
                 "memory-size")  # fmt: skip
"""Schemas whose columns no page lists, or under another name."""


@lru_cache(maxsize=1)
def answers() -> Mapping[str, Columns]:
    """The columns of every answer, by the name of its schema."""
    types: list[type[Result]] = [getattr(nvprof_kit, name) for name in RESULTS]
    return {schema: columns for answer in types for schema, columns in answer.columns.items()}


@lru_cache(maxsize=1)
def texts() -> Mapping[str, str]:
    """Every generated text by its name."""
    made = {f"help-{verb.replace(' ', '-')}": f"```\n{_help(verb)}\n```" for verb in _verbs()}
    tables: dict[str, Mapping[str, Any]] = {
        **{schema: columns for schema, columns in answers().items() if not schema.startswith(WITHOUT_TABLE)},
        "layers": COLUMNS,
        "layers-memory": LAYER_MEMORY_COLUMNS,
        "layers-split": LAYER_SPLIT_COLUMNS,
        "layers-fold": FOLDED,
        "breakdown": answers()["breakdown-steps"],
        "memory": answers()["memory-layer"],
        "profiler": layer_profile.COLUMNS,
        "profiler-kinds": layer_profile.KIND_COLUMNS,
        "utilisation": utilisation.COLUMNS,
    }
    for verb, columns in tables.items():
        rows = [f"| `{name}` | {getattr(column, 'meaning', column)} |" for name, column in columns.items()]
        made[f"columns-{verb}"] = "\n".join(["| column | meaning |", "|---|---|", *rows])
    made |= {f"example-{name}": _example(line) for name, line in EXAMPLES.items()}
    made["attribution-programs"] = attribution_programs()
    made["columns-maps"] = _maps()
    made["tables"] = _tables()
    made["tables-other"] = _other_tables()
    made["presets"] = _presets()
    made["schemas"] = _schemas()
    made |= _api(tables)
    made["gpu-peaks"] = _gpu_peaks()
    made["rules-advise"] = _rules()
    return made


def _api(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The sections of the page of the API."""
    links = {id(columns): f"[{verb}]({_place(verb)})" for verb, columns in tables.items() if _place(verb)}
    for heading, (_, columns) in OTHER_TABLES.items():
        links[id(columns)] = f"[{heading}](data.md#{_anchor(heading)})"
    made = {f"api-{name}": api_page.section(packages, links) for name, packages in api_page.SECTIONS.items()}
    return made | {"api-types": api_page.types(links)}


def _place(verb: str) -> str:
    """The page and heading below which the columns of a table are described; '' if no page does."""
    for page in sorted(DOCS.glob("*.md")):
        before, found, _ = page.read_text(encoding="utf-8").partition(f"<!-- columns-{verb} -->")
        if found:
            heading = re.findall(r"^#+ (.*)$", before, re.M)[-1]
            return f"{page.name}#{_anchor(heading)}"
    return ""


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def _rules() -> str:
    """The table of the rules of `advise`, of their functions' docstrings."""
    rules = {"slowest-rank": Rule(comm_rules.slowest_first), **RULES}
    lines = ["| rule | condition | least share of the time | saves at most |", "|---|---|---:|---|"]
    for name, rule in rules.items():
        paragraphs = [" ".join(text.split()) for text in (rule.look.__doc__ or "").split("\n\n")]
        saves = next(text.removeprefix("Saves: ") for text in paragraphs if text.startswith("Saves: "))
        least = f"{100 * rule.min_share:g} %" if rule.min_share else ""
        lines.append(f"| `{name}` | {paragraphs[0].removesuffix('.')} | {least} | {saves.removesuffix('.')} |")
    return "\n".join(lines)


def _gpu_peaks() -> str:
    """The peaks of the GPUs that the package knows, each with the document that states them."""
    lines = [f"| GPU | {' | '.join(DTYPES)} | GB/s | source |", f"|---|{'---:|' * (len(DTYPES) + 1)}---|"]
    for _, peaks in known_gpus():
        cells = [f"{peaks.flops[dtype] / 1e12:,.5g}" if dtype in peaks.flops else "" for dtype in DTYPES]
        lines.append(f"| {peaks.name} | {' | '.join(cells)} | {peaks.bandwidth / 1e9:,.0f} | {peaks.source} |")
    return "\n".join(lines)


def _example(line: str) -> str:
    """What a command prints, without what nsys says of the capture."""
    data = DOCS.parent / "tests" / "data"
    words = [str(data / word) if word.endswith(".xz") else word for word in line.split()]
    shown = CliRunner().invoke(group, words, env={"COLUMNS": "120"}, catch_exceptions=False).stdout
    kept = [text.replace(f"{data}/", "") for text in shown.rstrip().splitlines() if not text.startswith("! ")]
    return "\n".join(["```", f"$ nvprof-kit {line}", *kept, "```"])


def _maps() -> str:
    """The tables of a rank's map and their columns."""
    lines = [f"Version {MAP_VERSION}.", "", "| table | column | type | meaning |", "|---|---|---|---|"]
    for table, columns in MAP_TABLES.items():
        for name, column in columns.items():
            kind = {"object": "text"}.get(column.dtype, column.dtype)
            lines.append(f"| `{table}` | `{name}` | {kind} | {column.meaning} |")
    return "\n".join(lines)


TABLE_MEANINGS = {
    "operations": "GPU operations with the layer, phase and step that each belongs to. All columns of `ops`, and:",
    "ops": "GPU operations; in a capture without a GPU, the self time of CPU operators.",
    "ranges": "NVTX ranges of the capture's domain, or annotations of a PyTorch trace. Texts are translated by the "
    "rules.",
    "marks": "NVTX marks of that domain.",
    "api": "CUDA runtime and driver calls that launched operations.",
    "calls": "All CUDA runtime and driver calls, profiler overheads, and PyTorch operators.",
    "loads": "Calls that load CUDA modules or libraries, compile or autotune.",
    "graph_nodes": "Creations of CUDA graph nodes (nsys `--cuda-graph-trace=node`).",
    "operators": "PyTorch operators with autograd sequence numbers (PyTorch traces).",
    "frames": "Calls of Python functions (PyTorch traces recorded with stacks).",
    "shapes": "Arguments of operators (PyTorch traces recorded with shapes).",
    "collectives": "Calls of NCCL, and the collectives of PyTorch traces.",
    "allocations": "CUDA memory allocations and frees (nsys `--cuda-memory-usage=true`).",
    "samples": "GPU Metrics samples (nsys `--gpu-metrics-device`).",
    "scheduled": "Intervals in which a thread ran on a CPU (nsys `--cpuctxsw`).",
}
"""The tables of a capture, in the order of the page."""


def _tables() -> str:
    """Every table of a capture and its columns."""
    tables = {**CAPTURE_TABLES, ATTRIBUTED: OWNER_COLUMNS}
    lines = []
    for table, meaning in {**TABLE_MEANINGS, **{name: "" for name in tables if name not in TABLE_MEANINGS}}.items():
        lines += [f"## {table}", "", meaning, "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {column.dtype} | {column.meaning} |" for name, column in tables[table].items()]
        lines.append("")
    return "\n".join(lines).rstrip()


OTHER_TABLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Snapshot: events": (
        "`open_snapshot(...).snapshot.events`: the allocator's history, per device in order.",
        SNAPSHOT_TABLES["events"],
    ),
    "Snapshot: segments": (
        "`open_snapshot(...).snapshot.segments`: memory reserved from CUDA.",
        SNAPSHOT_TABLES["segments"],
    ),
    "Snapshot: blocks": ("`open_snapshot(...).snapshot.blocks`: the parts of the segments.", SNAPSHOT_TABLES["blocks"]),
    "Nsight Compute: kernels": ("`open_ncu(...).report.kernels`: one row per measured kernel.", KERNELS),
    "Timer logs: stages": (
        "`open_timers(...).logs.stages`: one row per call of a stage on a rank.",
        read_toml("nvprof_kit._trace", "timer_log.toml")["stages"],
    ),
}
"""The tables of what is not a capture, by heading: what they are, and the meaning of their columns."""


def _other_tables() -> str:
    lines = []
    for heading, (meaning, columns) in OTHER_TABLES.items():
        lines += [f"## {heading}", "", meaning, "", "| column | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {getattr(column, 'meaning', column)} |" for name, column in columns.items()]
        lines.append("")
    return "\n".join(lines).rstrip()


def _schemas() -> str:
    """The schemas of the json answers."""
    files = [f"| `{name}` | {version} |" for name, version in
             (formats.schema_of(schema).values() for schema in sorted((*answers(), "ranks")))]  # fmt: skip
    return "\n".join(["| schema | version |", "|---|---|", *files])


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
        "| program | in a layer | layer 1 forward | recompute | backward | beside eager | its collectives |",
        "|---|---|---|---|---|---|---|",
    ]
    for capture, what in PROGRAMS.items():
        found = _second_block(capture)
        beside = f"{found.once / eager:.2f}" if found.once and capture not in OTHER_MODELS else ""
        forward, recompute, backward, comm = (
            f"{ms:.3f}" if ms >= 0.0005 else "" for ms in (*found.milliseconds, found.comm)
        )
        lines.append(f"| {what} | {found.in_a_layer:.1%} | {forward} | {recompute} | {backward} | {beside} | {comm} |")
    return "\n".join(lines)


class _Block(NamedTuple):
    """One capture's share of time in layers, and of its second block in ms per step: forward, recompute and backward
    without collectives, and the collectives.
    """

    in_a_layer: float
    milliseconds: tuple[float, float, float]
    comm: float

    @property
    def once(self) -> float:
        """Forward and backward, without what was computed again."""
        return self.milliseconds[0] + self.milliseconds[2]


def _second_block(capture: str) -> _Block:
    path = DOCS.parent / "tests" / "data" / f"{capture}.sqlite.xz"
    trace = open_capture(path, optional=("name",))
    without_comm = replace(trace, ops=trace.ops[~classify(trace.ops).is_a("comm")])
    whole, computing = layers(Operations(trace)), layers(Operations(without_comm))
    per_step = 1e6 * max(whole.summary.steps, 1)

    def times(result: Layers) -> list[float]:
        blocks = result.tree[result.tree["layer"].str.contains(r"(?:layers|h)\.1$")]
        phases = ("forward", "recompute", "backward")
        return [blocks.iloc[0][f"{phase}_ns"] / per_step if len(blocks) else 0.0 for phase in phases]

    forward, recompute, backward = times(computing)
    comm = sum(times(whole)) - forward - recompute - backward
    return _Block(whole.summary.loop_layer_share, (forward, recompute, backward), comm)


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
        command._help_option = None  # click keeps the one of whoever asked first, who may have had other names for it
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    return command.get_help(context)


_PLACE = re.compile(r"^<!-- ([a-z0-9-]+) -->$", re.M)


def filled(page: str) -> str:
    """A page with its generated texts.

    Raises:
        KeyError: The page names a text that does not exist.
    """
    return _PLACE.sub(lambda found: texts()[found[1]], page)
