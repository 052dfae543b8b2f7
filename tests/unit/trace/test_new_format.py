"""What a new format of captures takes: a reader, its line in the registry, and this test. Validation, layers and all
other questions follow from the tables.
"""

from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest

import nvprof_kit
from nvprof_kit._trace import open as opening
from nvprof_kit._trace.schema import TABLES, CaptureInfo, Trace
from nvprof_kit.errors import CaptureError


class ToyReader:
    """Lines of text: ``range NAME START END`` and ``kernel START END CALL``, the kernel's launch at CALL."""

    sources: ClassVar = {"ops": "lines of kernels", "ranges": "lines of ranges"}

    def sniff(self, path: Path, header: bytes) -> bool:
        return header.startswith(b"toy\n")

    def read(self, source: Any, request: Any) -> Trace:
        lines = [line.split() for line in source.path.read_text().splitlines()[1:]]
        ranges = [(int(start), int(end), 1, 1, True, False, "forward", name, None)
                  for kind, name, start, end in lines if kind == "range"]  # fmt: skip
        kernels = [tuple(map(int, words)) for kind, *words in lines if kind == "kernel"]
        ops = [(start, end, 0, 1, number, -1, 0, "gemm", 7, -1, "")
               for number, (start, end, _) in enumerate(kernels, 1)]  # fmt: skip
        return Trace(
            CaptureInfo(str(source.named), "toy 1", domain="nvprof_kit", gpus=("GPU",), ordinals=(0,)),
            table("ranges", ranges),
            table("api", [(call, 1, 1, number) for number, (*_, call) in enumerate(kernels, 1)], 4),
            table("ops", ops, 10, "host_memory"),
            table("graph_nodes", []),
            **{name: table(name, []) for name in request.optional if name in TABLES},
        )

    def read_more(self, source: Any, trace: Trace, request: Any) -> Trace:
        return self.read(source, request)


def table(name: str, rows: list[Any], first: int | None = None, *more: str) -> pd.DataFrame:
    columns = [*list(TABLES[name])[:first], *more]
    return pd.DataFrame(rows, columns=columns).astype({column: TABLES[name][column].dtype for column in columns})


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(opening, "READERS", [*opening.READERS, ToyReader()])
    (path := tmp_path / "run.toy").write_text("toy\nrange layers.0 100 400\nkernel 500 530 200\nkernel 530 590 300\n")
    return path


def test_a_new_format_answers_every_question(capture):
    opened = nvprof_kit.open(capture)
    rows = opened.layers().to_frame()
    assert rows.set_index("layer")["gpu_self_ns"].to_dict()["layers.0"] == 90
    assert "gemm" in str(opened.summary("kernel"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kernel 500 499 200", r"operations \(lines of kernels\): 1 end before they begin"),
        (f"kernel 500 {1 << 60} 200", "more than 100 days apart"),
        ("range layers.1 300 200", r"ranges \(lines of ranges\): 1 end before they begin"),
    ],
)
def test_what_a_new_format_reads_is_validated(capture, line, message):
    capture.write_text(capture.read_text() + f"{line}\n")
    with pytest.raises(CaptureError, match=message):
        nvprof_kit.open(capture).layers()
