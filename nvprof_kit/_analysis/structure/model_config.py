"""Checks and names blocks by a model's ``config.json`` of Hugging Face: how many there are, and their paths."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nvprof_kit._analysis.structure.structure import EVIDENCE
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_CATEGORIES

_COUNTS = (("num_hidden_layers", "n_layer", "num_layers", "n_layers"),)
_COUNTS_OF_TWO = (
    ("encoder_layers", "num_layers", "num_hidden_layers"),
    ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers"),
)
_STRUCTURE = re.compile(r"((?:\w+\.)?blocks)\.(\d+)(?=\.|$)")
_NUMBERED = re.compile(r"((?:[^.]+\.)*?[^.]+)\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class ModelConfig:
    """What a ``config.json`` tells of a model's blocks.

    Attributes:
        source: The file's name.
        model_type: Hugging Face's name of the architecture.
        counts: The number of blocks; of an encoder and a decoder, both.
        paths: The path of each stack of blocks, without numbers; empty if not known for this `model_type`.
    """

    source: str
    model_type: str
    counts: tuple[int, ...]
    paths: tuple[str, ...]


def read_model_config(path: Path) -> ModelConfig:
    """Read a ``config.json``.

    Raises:
        UsageError: The file cannot be read, or does not say how many layers the model has.
    """
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--model {path}: cannot read it: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--model {path}: not JSON; needed the config.json of a Hugging Face model") from None
    if not isinstance(config, dict):
        raise UsageError(f"--model {path}: not a JSON object; needed the config.json of a Hugging Face model")
    values, model_type = config, str(config.get("model_type", ""))
    layouts: list[dict[str, Any]] = read_toml("nvprof_kit._analysis.structure", "model_types.toml")["architecture"]
    unknown: dict[str, Any] = {"base": "", "stacks": ()}
    layout = next((layout for layout in layouts if model_type in layout["model_types"]), unknown)
    base, stacks = layout["base"], layout["stacks"]
    if isinstance(config.get("text_config"), dict) and not any(key in config for key in _COUNTS[0]):
        values, stacks = config["text_config"], ()
    counts = []
    for keys in _COUNTS_OF_TWO if len(stacks) == 2 or config.get("is_encoder_decoder") is True else _COUNTS:
        count = next((values[key] for key in keys if values.get(key) is not None), None)
        if type(count) is not int or count < 1:
            number = "no number of layers" if count is None else f"{count!r} as number of layers"
            raise UsageError(f"--model {path}: {number}; needed a positive {' or '.join(keys)}")
        counts.append(count)
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    has_head = not architecture.endswith("Model") or architecture.endswith(("HeadModel", "HeadsModel"))
    paths = tuple((base if has_head else "") + stack for stack in stacks)
    return ModelConfig(path.name, model_type, tuple(counts), paths)


def name_blocks(trace: Trace, config: ModelConfig) -> Trace:
    """Check the number of blocks that a capture shows; where they are from structure, give them the model's paths.

    Returns:
        The capture; `CaptureInfo.warnings` says whether the numbers agree. If they do not, no block is renamed.
    """
    text, category = trace.ranges["text"].cat, trace.ranges["category"].astype(str).to_numpy()
    codes = text.codes.to_numpy()[np.isin(category, [kind.value for kind in LAYER_CATEGORIES])]
    from_structure = trace.info.evidence == EVIDENCE
    pattern = _STRUCTURE if from_structure else _NUMBERED
    numbers: dict[str, set[int]] = {}
    for code in np.unique(codes[codes >= 0]).tolist():
        if match := pattern.match(str(text.categories[code])):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    counts = {stack: len(values) for stack, values in numbers.items()}
    sides = [list(counts)]
    if len(config.counts) == 2:
        sides = [[stack for stack in counts if side in stack] for side in ("encoder", "decoder")]
        if not all(sides):
            sides = [[stack] for stack in sorted(counts)] if len(counts) == 2 else []
    partners = {
        stack: number
        for number, stacks in enumerate(sides)
        for stack in stacks
        if counts[stack] == config.counts[number]
    }
    facts = {"source": config.source, "blocks": " and ".join(map(str, config.counts))}
    if len(set(partners.values())) < len(config.counts):
        stacks = ", ".join(f"{count} {stack}" for stack, count in sorted(counts.items(), key=lambda item: -item[1])[:4])
        return _with_issue(trace, "model-differs", stacks=stacks or "none", **facts)
    if not from_structure:
        return trace
    if not config.paths:
        facts |= {"model_type": config.model_type, "names": ", ".join(partners)}
        return _with_issue(trace, "model:unknown-paths", **facts)
    paths = {stack: config.paths[number] for stack, number in partners.items()}

    def rename(path: str) -> str:
        match = _STRUCTURE.match(path)
        return f"{paths[match[1]]}{path[len(match[1]) :]}" if match and match[1] in paths else path

    texts = labels(text.codes.to_numpy(), [rename(str(name)) for name in text.categories])
    names = ", ".join(f"{stack} are named {path}" for stack, path in paths.items())
    return _with_issue(replace(trace, ranges=trace.ranges.assign(text=texts)), "model", names=names, **facts)


def _with_issue(trace: Trace, code: str, **facts: str) -> Trace:
    return replace(trace, info=replace(trace.info, warnings=(*trace.info.warnings, Issue.of(code, **facts))))
