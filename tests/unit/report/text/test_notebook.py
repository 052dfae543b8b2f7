"""What a notebook shows of an answer: a table in HTML, once."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import rich.jupyter

import nvprof_kit

DATA = Path(__file__).parents[3] / "data"


class ZMQInteractiveShell:
    """By this name rich knows that it runs in Jupyter."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What rich shows by itself in a notebook."""
    found: list[object] = []
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(rich.jupyter, "display", lambda *parts: found.append(parts))
    return found


def test_an_answer_is_shown_once(shown: list[object]) -> None:
    layers = nvprof_kit.open(DATA / "encoder-2023.4.sqlite.xz").layers(depth=2)
    assert layers._repr_html_().startswith("<pre")
    assert "Encoder" in str(layers) and "Encoder" in repr(layers)
    assert shown == []  # else each line stands above the table once more


def test_a_job_and_its_tables(shown: list[object]) -> None:
    ranks = [DATA / "ranks" / f"ranks-ddp-layer.rank{rank}-2024.2.sqlite.xz" for rank in (0, 1)]
    job = nvprof_kit.open_job(ranks, workers=1)
    assert "straggler" in job._repr_html_() and repr(job) == str(job)
    clocks = job.clocks()
    assert clocks._repr_html_().startswith("<pre") and "offset" in repr(clocks)
    assert shown == []


def test_a_large_picture_is_kept_as_dots() -> None:
    capture = nvprof_kit.open(DATA / "slow-2024.2.sqlite.xz")
    assert "data:image/svg+xml" in capture.plot("layers")._repr_html_()
    timeline = capture.plot("timeline", step=5)._repr_html_()
    assert "data:image/png" in timeline and len(timeline) < 200_000
