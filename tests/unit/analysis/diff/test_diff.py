"""Two captures compared: what is a change, what is variation, what cannot be compared, and the gates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.nsys_file import NsysFile

from nvprof_kit.analysis.diff.diff import OPTIONAL, DiffOptions, DiffResult, diff
from nvprof_kit.analysis.diff.gates import parse_gate
from nvprof_kit.errors import CaptureError, UsageError
from nvprof_kit.report.text.diff import diff_markdown
from nvprof_kit.trace.open import open_capture
from nvprof_kit.trace.schema import Trace

DATA = Path(__file__).parents[3] / "data"
STEADY = (100, 101, 99, 102, 98, 100)


def capture(path: Path, lengths: tuple[int, ...] = STEADY, gemm: str = "nvjet_a", backward: bool = False) -> Path:
    """Steps of 1000 ns; in each a gemm of layers.0 of the given length and an elementwise kernel of 50 of layers.1."""
    file = NsysFile(path)
    for number, length in enumerate(lengths):
        begin = 1000 * number
        file.range_(f"step {number}", begin, begin + 500 + length, category="step", payload=number)
        file.range_("layers.0", begin + 10, begin + 20)
        file.range_("layers.1", begin + 20, begin + 30, category="backward" if backward else "forward")
        file.kernel(begin + 100, begin + 100 + length, launched=(begin + 11, begin + 12), name=gemm)
        file.kernel(begin + 300, begin + 350, launched=(begin + 21, begin + 22), name="vectorized_elementwise_kernel")
    return file.write()


def opened(path: Path) -> Trace:
    return open_capture(path, optional=OPTIONAL)


def compared(tmp_path: Path, *lengths: tuple[int, ...], **new: str) -> DiffResult:
    base = opened(capture(tmp_path / "base.sqlite", lengths[0]))
    return diff(base, opened(capture(tmp_path / "new.sqlite", lengths[1], **new)))  # type: ignore[arg-type]


def row(result: DiffResult, **what: str) -> dict[str, object]:
    rows = result.rows
    for name, value in what.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1
    return rows.iloc[0].to_dict()


def test_a_clear_change_is_found_where_it_is(tmp_path: Path) -> None:
    result = compared(tmp_path, STEADY, tuple(2 * length for length in STEADY))
    gemm = row(result, level="layer", layer="layers.0")
    assert (gemm["base_ns"], gemm["new_ns"], gemm["change"], gemm["verdict"]) == (100, 200, 1.0, "slower")
    assert gemm["low"] <= 1.0 <= gemm["high"]
    assert row(result, level="class", kernel_class="gemm")["verdict"] == "slower"
    assert row(result, level="layer", layer="layers.1")["verdict"] == "same"
    # the step's range is 500 + length: 600 becomes 700
    assert (row(result, level="step")["base_ns"], row(result, level="step")["new_ns"]) == (600, 700)
    assert row(result, level="step")["verdict"] == "slower"


def test_variation_from_step_to_step_is_no_change(tmp_path: Path) -> None:
    # the median rises from 100 to 130, but the steps of both spread over all of that
    result = compared(tmp_path, (60, 140, 100, 70, 130, 100), (150, 60, 140, 130, 75, 130))
    assert row(result, level="layer", layer="layers.0")["verdict"] == "same"


def test_a_difference_below_the_noise_is_none(tmp_path: Path) -> None:
    result = compared(tmp_path, (10000,) * 6, (10050,) * 6)
    assert row(result, level="layer", layer="layers.0")["p"] < 0.05
    assert row(result, level="layer", layer="layers.0")["verdict"] == "same"


def test_a_capture_does_not_differ_from_itself(tmp_path: Path) -> None:
    path = DATA / "hooks-ddp-2024.2.sqlite.xz"
    result = diff(opened(path), opened(path))
    assert set(result.rows["verdict"]) == {"same"}
    assert not len(result.kernels)
    assert (result.rows["change_ns"] == 0).all()


def test_the_classes_of_a_real_capture_add_up() -> None:
    path = DATA / "hooks-graph-2023.4.sqlite.xz"
    trace = opened(path)
    result = diff(trace, trace)
    sums = {level: rows["base_ns"].sum() for level, rows in result.rows.groupby("level")}
    spent = (trace.ops["end_ns"] - trace.ops["start_ns"]).sum() / 4
    # medians of parts over four steps come near to a quarter of all operations' time, the captured step's aside
    assert sums["class"] == pytest.approx(spent, rel=0.02)
    assert sums["layer class"] == pytest.approx(sums["class"], rel=0.02)


def test_kernels_new_gone_and_renamed(tmp_path: Path) -> None:
    renamed = compared(tmp_path, STEADY, STEADY, gemm="nvjet_b").kernels
    assert renamed[["what", "name", "now", "kernel_class", "count"]].to_numpy().tolist() == [
        ["renamed", "nvjet_a", "nvjet_b", "gemm", 1.0]
    ]
    replaced = compared(tmp_path, STEADY, STEADY, gemm="flash_fwd_kernel").kernels
    assert replaced[["what", "name"]].to_numpy().tolist() == [["gone", "nvjet_a"], ["new", "flash_fwd_kernel"]]


def test_what_cannot_be_compared_is_refused_with_the_reason(tmp_path: Path) -> None:
    base, few = opened(capture(tmp_path / "base.sqlite")), opened(capture(tmp_path / "few.sqlite", (1, 2, 3)))
    trained = opened(capture(tmp_path / "trained.sqlite", backward=True))
    with pytest.raises(CaptureError, match="3 steps to compare, needed 4"):
        diff(base, few)
    with pytest.raises(CaptureError, match=r"other windows \(phases forward; backward, forward\)"):
        diff(base, trained)
    with pytest.raises(CaptureError, match=r"other GPUs \(NVIDIA H200; Test GPU\)"):
        diff(opened(DATA / "hooks-ddp-2024.2.sqlite.xz"), base)
    result = diff(base, trained, options=DiffOptions(anyway=True))
    assert "compared in spite of this: other windows" in result.warnings[0]


def test_first_steps_can_be_left_out(tmp_path: Path) -> None:
    base = opened(capture(tmp_path / "base.sqlite", (900, *STEADY)))
    result = diff(base, base, options=DiffOptions(skip_steps=1))
    assert result.base_steps == 6
    with pytest.raises(CaptureError, match="has 0 steps"):
        diff(base, base, options=DiffOptions(skip_steps=9, anyway=True))


def test_what_ran_only_in_steps_left_out_is_neither_new_nor_gone(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "warm.sqlite")
    for number in range(7):
        begin = 1000 * number
        file.range_(f"step {number}", begin, begin + 600, category="step", payload=number)
        file.range_("layers.0", begin + 10, begin + 20)
        file.kernel(begin + 100, begin + 200 + number, launched=(begin + 11, begin + 12), name="nvjet_a")
        if number == 0:
            file.range_("warm", begin + 30, begin + 40)
            file.kernel(begin + 300, begin + 350, launched=(begin + 31, begin + 32), name="sort_autotune")
    warm = opened(file.write())
    options = DiffOptions(skip_steps=1)
    steady = opened(capture(tmp_path / "base.sqlite"))
    for pair in ((warm, steady), (steady, warm)):
        result = diff(*pair, options=options)
        assert "sort_autotune" not in {*result.kernels["name"]}
        assert "warm" not in {*result.rows["layer"]}
        assert len(result.rows[result.rows["level"] == "step"]) == 1
    assert diff(warm, warm, options=options).base_steps == 6


def many_layers(path: Path, steps: int, slow: int = 1, late: int = 99) -> Trace:
    """Twelve layers of 100 ns in each step, of which layers.3 takes longer, and a layer of some steps alone."""
    file = NsysFile(path)
    for number in range(steps):
        begin = 10_000 * number
        file.range_(f"step {number}", begin, begin + 9_000, category="step", payload=number)
        for layer in range(12):
            at, length = begin + 400 * layer, (100 + number) * (slow if layer == 3 else 1)
            file.range_(f"layers.{layer}", at, at + 20)
            file.kernel(at + 30, at + 30 + length, launched=(at + 1, at + 2), name="nvjet")
        if number >= late:
            file.range_("eval", begin + 5_000, begin + 5_010)
            file.kernel(begin + 5_100, begin + 5_200 + number, launched=(begin + 5_001, begin + 5_002), name="nvjet")
    return opened(file.write())


def test_few_steps_tell_a_layer_that_a_gate_names(tmp_path: Path) -> None:
    base, new = many_layers(tmp_path / "base.sqlite", 4), many_layers(tmp_path / "new.sqlite", 4, slow=2)
    result = diff(base, new, [parse_gate("layers.3:+10%"), parse_gate("layers.*:+10%")])
    # the smallest p of four steps against four is 2 / 70; times twelve layers it is none below 5 %
    assert row(result, level="layer", layer="layers.3")["verdict"] == "same"
    assert "4 and 4 steps are too few to tell a change of one layer among 12" in result.warnings[0]
    assert [one.held for one in result.gates] == [False, True]
    assert result.gates[1].reason.endswith("but too few steps to tell it among 12 rows")
    enough = diff(many_layers(tmp_path / "a.sqlite", 6), many_layers(tmp_path / "b.sqlite", 6, slow=2))
    assert row(enough, level="layer", layer="layers.3")["verdict"] == "slower"
    assert not enough.warnings


def test_a_gate_on_a_layer_that_most_steps_of_base_lack(tmp_path: Path) -> None:
    base, new = many_layers(tmp_path / "base.sqlite", 10, late=9), many_layers(tmp_path / "new.sqlite", 10, late=0)
    gates = diff(base, new, [parse_gate("eval:+10%")]).gates
    assert not gates[0].held and gates[0].reason.startswith("eval forward ran in fewer than half of the steps before")
    gates = diff(base, base, [parse_gate("eval:+10%")]).gates
    assert gates[0].held and gates[0].reason == "at most +0.0 % (eval forward)"


@pytest.mark.parametrize(
    ("gate", "held", "reason"),
    [
        ("step:+5%", False, "step +16.7 %, the limit is +5 %"),
        ("step:+20%", True, "at most +16.7 %"),
        ("layers.*:+50%", False, "layers.0 forward +100.0 %"),
        ("layers.1:+0.5%", True, "at most +0.0 %"),
        ("class:gemm:+10%", False, "gemm +100.0 %"),
        ("phase:forward:+50%", False, "all forward +100.0 %, the limit is +50 %"),
        ("phase:backward:+1%", True, "at most +0.0 % (all backward)"),
        ("layers.0 forward:+50%", False, "layers.0 forward +100.0 %"),
        ("layers.* backward:+1%", True, "at most +0.0 % (layers.1 backward)"),
    ],
)
def test_gates(tmp_path: Path, gate: str, held: bool, reason: str) -> None:
    base = opened(capture(tmp_path / "base.sqlite", backward=True))
    slow = opened(capture(tmp_path / "new.sqlite", tuple(2 * length for length in STEADY), backward=True))
    outcome = diff(base, slow, [parse_gate(gate)]).gates[0]
    assert outcome.held == held
    assert outcome.reason.startswith(reason)


def test_a_gate_does_not_fail_on_variation(tmp_path: Path) -> None:
    base = opened(capture(tmp_path / "base.sqlite", (60, 140, 100, 70, 130, 100)))
    noisy = opened(capture(tmp_path / "new.sqlite", (150, 60, 140, 130, 75, 130)))
    outcome = diff(base, noisy, [parse_gate("layers.0:+5%")]).gates[0]
    assert outcome.held and "within step-to-step variation" in outcome.reason


@pytest.mark.parametrize("text", ["step", "step:5%", "step:+5", "step:-5%", ":+5%"])
def test_a_gate_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="TARGET"):
        parse_gate(text)


def test_a_gate_on_nothing_is_refused(tmp_path: Path) -> None:
    base = opened(capture(tmp_path / "base.sqlite"))
    with pytest.raises(UsageError, match="neither capture has such a layer"):
        diff(base, base, [parse_gate("layer.9:+5%")])
    with pytest.raises(UsageError, match="neither capture has such a phase"):
        diff(base, base, [parse_gate("phase:backwards:+5%")])
    with pytest.raises(UsageError, match="neither capture has such a layer"):
        diff(base, base, [parse_gate("layers.0 backward:+5%")])


def test_the_command_line(tmp_path: Path) -> None:
    base = capture(tmp_path / "base.sqlite")
    slow = capture(tmp_path / "new.sqlite", tuple(2 * length for length in STEADY))

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nvprof_kit", "diff", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    failed = run(base, slow, "--fail-on", "step:+5%")
    assert failed.returncode == 1 and "FAILS: step:+5%" in failed.stdout and not failed.stderr
    assert run(base, slow, "--fail-on", "step:+50%").returncode == 0
    refused = run(base, DATA / "eager-2023.4.sqlite.xz")
    assert refused.returncode == 2 and "cannot be compared" in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_markdown_for_a_pull_request(tmp_path: Path) -> None:
    base = opened(capture(tmp_path / "base.sqlite"))
    slow = opened(
        capture(tmp_path / "new.sqlite", tuple(2 * length for length in STEADY), gemm="nvjet_<b>|*`[x](y)&lt;")
    )
    text = diff_markdown(diff(base, slow, [parse_gate("step:+5%")]), 10)
    assert text.startswith("**The step is slower by 16.7 %")
    assert "- ❌ FAILS: step:+5%" in text
    assert "nvjet_&lt;b>\\|\\*\\`\\[x\\](y)&amp;lt;" in text
