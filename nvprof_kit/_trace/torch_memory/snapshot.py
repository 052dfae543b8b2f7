"""A snapshot of the CUDA caching allocator (``torch.cuda.memory._dump_snapshot``) as tables."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.annotations import loop_annotation
from nvprof_kit._trace.files.kinds import description_of
from nvprof_kit._trace.reader import Request, Source
from nvprof_kit._trace.schema import read_tables
from nvprof_kit._trace.torch_memory.load import PlainUnpickler
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import MEMORY_SPANS, Category, kineto_name, memory_label, parse_memory_label, step_number

if TYPE_CHECKING:
    import pandas as pd

TABLES = read_tables("nvprof_kit._trace.torch_memory")
"""The tables of a `Snapshot`, and their columns."""

_LATEST_US = 1 << 52
"""The year 2112; allocator times count from 1970."""

Frames = list[dict[str, Any]]
"""A call stack, innermost first, each frame with filename, line and name."""


@dataclass(frozen=True)
class Snapshot:
    """The state and history of the allocator.

    Attributes:
        path: The file as given by the user.
        events: The history; columns ``events``.
        segments: Memory reserved from CUDA; columns ``segments``.
        blocks: The parts of the segments; columns ``blocks``.
        stacks: The distinct call stacks, by their numbers in `events`.
    """

    path: str
    events: pd.DataFrame
    segments: pd.DataFrame
    blocks: pd.DataFrame
    stacks: list[Frames] = field(repr=False)


class SnapshotReader:
    """A snapshot. A child process loads it (`nvprof_kit._trace.torch_memory.load`), so that neither its limits nor the
    file's resource use affects this process.
    """

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path may be of this format."""
        return not path.is_dir() and (header.startswith(b"\x80") or not description_of(header))

    def read(self, source: Source, request: Request) -> Snapshot:
        """Read a snapshot.

        Raises:
            CaptureError: The file is not a pickle, contains more than plain data, or is not a snapshot.
        """
        # -I, -S: import nothing from the current folder, the environment, or other packages
        script = "import sys; sys.path.insert(0, sys.argv.pop(1)); import load; load.main(*sys.argv[1:])"
        command: list[str | Path] = [sys.executable, "-ISc", script, Path(__file__).parent, source.path, MEMORY_SPANS]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            try:
                import pandas  # noqa: F401 - needed for the tables later; the import overlaps with the child process

                content: dict[str, Any] = PlainUnpickler(child.stdout).load()
            except (EOFError, pickle.UnpicklingError):
                reason = "refused as a snapshot: loading it takes more time or memory than its size accounts for"
                content = {"error": reason}
            finally:
                child.kill()
        if "error" in content:
            raise CaptureError(f"{source.named}: {content['error']}")
        return _snapshot(content, source.named)


def _snapshot(content: dict[str, Any], path: Path) -> Snapshot:
    """The tables of a snapshot, from the columns that the child process sent."""
    import pandas as pd

    from nvprof_kit._trace.validate import check_bounds, check_columns, check_time_span

    stacks = content.pop("stacks")
    columns = {name: {key: _column(value) for key, value in table.items()} for name, table in content.items()}
    events, segments, blocks = columns["events"], columns["segments"], columns["blocks"]
    time_us = events.pop("time_us")
    check_bounds(f"{path}: device_traces.time_us", time_us, -_LATEST_US, _LATEST_US)
    events |= {"time_ns": time_us * 1000}
    events["label"] = _labels(events, columns["spans"], columns["annotations"])
    if "address" not in blocks:  # PyTorch up to 2.1 gives the address of a segment only; its blocks follow each other
        sizes = pd.Series(blocks["size_bytes"])
        ends = sizes.groupby(blocks["segment"]).cumsum().to_numpy()
        blocks["address"] = segments["address"][blocks["segment"]] + ends - blocks["size_bytes"]
    tables = {}
    for name, schema in TABLES.items():
        tables[name] = pd.DataFrame({key: columns[name][key] for key in schema}, copy=False)
        check_columns(f"{path}: {name}", tables[name], schema)
    check_time_span(path, [events["time_ns"][time_us > 0]])
    return Snapshot(str(path), **tables, stacks=stacks)


def _column(value: Any) -> Any:
    """Integers from their bytes; a categorical from the codes of texts and the texts."""
    import numpy as np

    from nvprof_kit._trace.frames import labels

    return labels(_column(value[0]), value[1]) if isinstance(value, tuple) else np.frombuffer(value, "int64")


def _labels(events: dict[str, Any], spans: dict[str, Any], annotations: dict[str, Any]) -> Any:
    """The labels of the events. One without a label gets the program's step and phase at that time; one without layer
    and phase is completed from PyTorch's annotations around it. A million events have a few hundred distinct labels.
    """
    import numpy as np

    from nvprof_kit._trace.frames import labels
    from nvprof_kit._trace.joins import distinct_rows

    time_us, device = events["time_ns"] // 1000, events["device"]
    texts = ["", *spans["label"]]
    program_label = np.searchsorted(spans["time_us"], time_us, side="right")
    pytorch_label = np.zeros(len(time_us), dtype=np.int64)
    for number in np.unique(annotations["device"]).tolist():
        starts, names = _open_annotations(annotations, number)
        is_on_device = device == number
        position = np.searchsorted(starts, time_us[is_on_device], side="right")
        pytorch_label[is_on_device] = np.where(position > 0, position + len(texts) - 1, 0)
        texts += names
    recorded = events["label"]
    rows, group = distinct_rows(recorded.codes.astype(np.int64), program_label, pytorch_label)
    event_labels = []
    for code, program_text, pytorch_text in zip(*(row.tolist() for row in rows), strict=True):
        label = recorded.categories[code] or texts[program_text]
        (name, step), (phase, step_around) = parse_memory_label(label), parse_memory_label(texts[pytorch_text])
        is_whole = name and step is not None
        event_labels.append(label if is_whole else memory_label(name or phase, step_around if step is None else step))
    return labels(group, event_labels)


def _open_annotations(annotations: dict[str, Any], device: int) -> tuple[list[int], list[str]]:
    """Start times of phases and steps annotated by PyTorch, and the label of allocations from then on: the innermost
    open phase and step.
    """
    columns = (annotations[name] for name in ("device", "time_us", "stage", "name"))
    of_device = (row for number, *row in zip(*columns, strict=True) if number == device)
    rows = [(time, stage == "START", name) for time, stage, name in of_device]
    of_loop = {name: annotation for name in {name for *_, name in rows} if (annotation := loop_annotation(name))}
    open_names: list[str] = []
    starts, texts = [], []
    for time, is_start, name in sorted(row for row in rows if row[2] in of_loop):
        if is_start:
            open_names.append(name)
        elif name in open_names:
            del open_names[len(open_names) - 1 - open_names[::-1].index(name)]
        steps = [number for open_name in open_names if (number := step_number(open_name)) is not None]
        annotated = [of_loop[open_name] for open_name in open_names]
        phases = [kineto_name(text, Category(kind)) for text, kind in annotated if kind != Category.STEP.value]
        starts.append(time)
        texts.append(memory_label(phases[-1] if phases else "", steps[-1] if steps else None))
    return starts, texts
