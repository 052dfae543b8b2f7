"""The fuzzer: some cases of every kind. ``make fuzz`` runs 12,000."""

import shutil
import time
from pathlib import Path

import pytest
from support.data import unpacked
from support.lane import examples

from fuzz import cases, fuzz, mutate

pytestmark = pytest.mark.slow

_SECONDS = 0.5 * examples(3)
"""For each kind, ten times as many in the full lane; a case more is begun until then, and a second one in any case."""


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_nothing_breaks(kind):
    """A case that is broken names itself, so that it can be run again: ``fuzz.judge(Case(…))``."""
    began = time.monotonic()
    for tried, case in enumerate(fuzz.chosen(200, 0, kind)):
        if tried >= 2 and time.monotonic() - began > _SECONDS:
            break
        wrong = fuzz.judge(case)
        assert not wrong, f"{case}: {wrong}"


VERB = ("ranks", "--view", "waits", "--format", "csv")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for rank in (0, 1):
        unpacked(f"ranks/ddp-gc.rank{rank}-2024.2.sqlite.xz", folder / f"run.rank{rank}.sqlite")
    return folder


@pytest.mark.parametrize(
    ("table", "column", "way"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "correlationId", "drop"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "streamId", "retype"),
        ("NVTX_EVENTS", "text", "null"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "end", "rename"),
    ],
)
def test_a_column_of_one_rank_is_named_or_has_no_effect(table, column, way, pair, tmp_path):
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    words = (*VERB, *(str(tmp_path / f"run.rank{rank}.sqlite") for rank in (0, 1)))
    whole = cases.run(words, tmp_path)
    assert (whole.status, whole.broken) == (0, "")
    mutate.change_column(pair / "run.rank1.sqlite", tmp_path / "run.rank1.sqlite", table, column, way)
    assert cases.judged(cases.run(words, tmp_path), whole, (column, table)) == ""
