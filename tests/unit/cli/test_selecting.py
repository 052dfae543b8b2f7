"""Which rows of an answer are shown: --where, --sort, --top, --fold, --columns, and which steps they are of."""

import csv
import io
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.captures import timer_log
from support.captures.nsys_file import NsysFile
from support.data import DATA, unpacked

import nvprof_kit
from nvprof_kit import StepOptions
from nvprof_kit._cli import group
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue, in_order, printed


@pytest.fixture
def capture(file: NsysFile) -> str:
    """Ten blocks, each of 100 ns of gemm and its `mlp` of 50; block 3 takes 300; a prefill and two decode steps."""
    for step, phase in enumerate(("prefill", "decode", "decode")):
        begin = 100_000 * step
        file.range_(f"step {step}", begin, begin + 90_000, category="step", payload=step)
        file.range_(phase, begin + 10, begin + 80_000, category="phase")
        for block in range(10):
            at = begin + 1000 + 5000 * block
            long = 200 if block == 3 else 0
            file.range_(f"layers.{block}", at, at + 4000, category="forward")
            file.range_(f"layers.{block}.mlp", at + 1000, at + 2000, category="forward")
            file.kernel(at + 100, at + 200 + long, launched=(at + 10, at + 20), name="ampere_sgemm_128x128_tn")
            file.kernel(at + 1100, at + 1150, launched=(at + 1010, at + 1020), name="flash_fwd_kernel")
    return str(file.write())


def table(*words: str) -> str:
    done = CliRunner().invoke(group, list(words), env={"COLUMNS": "120"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def on_data(line: str) -> list[str]:
    """The words of a command on captures of the tests."""
    return [str(DATA / word) if word.endswith(".xz") else word for word in line.split()]


def rows(*words: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table(*words, "--format", "csv"))))


def labels(text: str) -> list[str]:
    """The labels of the table for reading, between its rules."""
    lines = text.splitlines()
    rule = next(place for place, line in enumerate(lines) if line.startswith("──"))
    body = lines[rule + 1 : next(place for place in range(rule, len(lines)) if lines[place].startswith("total"))]
    return [line.strip().split("  ")[0] for line in body if line.strip() and line[0] != "("]


def test_equal_blocks_fold_where_there_are_many(capture):
    text = table("layers", capture)
    assert labels(text) == ["layers.0-2,4-9 x9", "mlp x9", "layers.3", "mlp"]
    assert "forward +133 %" in text  # 350 beside 150
    assert len(labels(table("layers", capture, "--no-fold"))) == 20


def test_where_sort_and_top(capture):
    assert labels(table("layers", capture, "--where", "*.mlp")) == ["layers.0-9.mlp x10"]
    text = table("layers", capture, "--where", "layers.3*")
    assert labels(text) == ["layers.3", "layers.3.mlp"] and "total of all rows" in text
    with pytest.raises(UsageError, match="layer matches; available: layers"):  # of those that are printed
        table("layers", capture, "--where", "*.mlp", "--depth", "1")
    assert rows("layers", capture, "--where", "*.mlp", "--depth", "1", "--top", "1")  # of the printed table only
    for column in ("gpu_total", "total_share", "compute_ns"):  # named as in csv
        text = table("layers", capture, "--no-fold", "--sort", column, "--top", "2")
        assert labels(text) == ["layers.3", "layers.0"]
    assert "… and 20 more rows; --top N or -o FILE.csv shows them" in text
    assert [row["layer"][-1] for row in rows("layers", capture, "--where", "*.3", "--where", "*.5")] == ["3", "5"]
    assert rows("layers", capture, "--sort", "gpu_self")[0]["layer"] == "layers.3"


def test_kernel_classes_are_columns(capture):
    first = rows("layers", capture, "--columns", "class")[0]
    assert (first["layer"], first["class_gemm_ns"], first["class_attention_ns"]) == ("layers.0", "300", "0")
    text = table("layers", capture, "--columns", "class", "--no-fold")
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("layer "))
    assert lines[head].split()[:4] == ["layer", "calls", "gemm", "attention"]
    # 300 ns of gemm in three steps, and with the mlp 150 of attention
    assert lines[head + 2].split()[:6] == ["layers.0", "1", "100", "ns", "50", "ns"]


def test_an_engines_steps_are_phases(tmp_path):
    file = NsysFile(tmp_path / "engine.sqlite")
    steps = {"execute_context_2(9)_generation_0(0)": "prefill", "step[DECODE bs=2]": "decode"}
    steps |= {"execute_88_context_1(sq8sk8)_generation_3(sq3)": "mixed", "execute_diffusion_1_256x256": "other"}
    for number, text in enumerate(steps):
        start = 1000 * number
        file.range_(text, start, start + 900, category="step", payload=number)
        file.range_("layers.0", start + 10, start + 800, category="forward")
        file.kernel(start + 100, start + 110 + number, launched=(start + 20, start + 30))
    (layer, *_) = rows("layers", str(file.write()), "--columns", "phase", "--steps", "all")
    assert [layer[f"during_{phase}_ns"] for phase in steps.values()] == ["10", "11", "12", "13"]


def test_one_process_of_several(tmp_path):
    file = NsysFile(tmp_path / "job.sqlite")
    for pid, length in ((500, 30), (400, 50)):  # the ranks are in the order of their devices
        file.range_("layers.0", 0, 900, category="forward", pid=pid)
        file.kernel(100, 100 + length, launched=(20, 30), pid=pid, device=int(pid == 400))
    path = str(file.write())
    times = [rows("layers", path, *words)[0]["gpu_self_ns"] for words in ((), ("--process", "0"), ("--process", "1"))]
    assert times == ["80", "30", "50"]
    assert "only the process of rank 1 is in the figures, one of 2" in table("layers", path, "--process", "1")
    with pytest.raises(UsageError, match="no process of rank 2; it has 0, 1"):
        raise CliRunner().invoke(group, ["layers", path, "--process", "2"]).exception or AssertionError


def first_words(text: str) -> list[str]:
    """The first two columns of a table by layer and phase."""
    lines = text.splitlines()
    rule = next(place for place, line in enumerate(lines) if line.startswith("──"))
    body = lines[rule + 1 : lines.index("", rule)]
    return [" ".join(line.split()[: 3 if " x" in line else 2]) for line in body if not line.startswith("Too wide for")]


@pytest.mark.parametrize(
    ("line", "blocks", "by_default"),
    [
        ("flops flops/llama12-2024.2.sqlite.xz", "model.layers.0-11 x12", True),
        ("metrics metrics/llama-2023.4.sqlite.xz", "model.layers.0-3 x4", False),
        ("ncu layers ncu/encoder-full-2025.3.csv.xz --capture ncu/encoder-2024.2.sqlite.xz",
         "encoder.layers.0-27 x28", True),
    ],
)  # fmt: skip
def test_every_table_of_layers_folds(line, blocks, by_default):
    words, (block, count) = on_data(line), blocks.split(" x")
    text = table(*words, "--fold")
    folded, whole = first_words(text), first_words(table(*words))
    assert {f"{blocks} forward", f"{blocks} backward"} <= set(folded)
    parts = f"{block.rpartition('.')[2]}.self_attn x{count} forward"
    assert any(line.endswith(parts) for line in folded)
    assert "--no-fold prints one line per block." in text
    assert whole == folded if by_default else not any(" x" in line for line in whole)
    if by_default:
        whole = first_words(table(*words, "--no-fold"))
    assert len(folded) < len(whole) and not any(" x" in line for line in whole)
    marked = rows(*words, "--fold")
    assert len(marked) == len(whole) and sum(row["folded_into"] == block for row in marked) == 2 * int(count)


JOB = " ".join(f"ranks/ddp-layer.rank{rank}-2024.2.sqlite.xz" for rank in (0, 1))


@pytest.mark.parametrize(
    ("line", "said", "into"),
    [
        ("breakdown slow-2024.2.sqlite.xz --view critical-path", ["layers.0-2,4-5.up x5", "+281 %"],
         {"layers.0-2,4-5.up", "layers.0-5"}),
        ("diff eager-2023.4.sqlite.xz checkpoint-2023.4.sqlite.xz", ["model.layers.0-3.mlp x4 recompute"],
         {"model.layers.0-3.mlp", "model.layers.0-3"}),
        ("memory run.pickle --by layer", ["layers.0-3.norm2 x4", "+549 %"],
         {"layers.1-3.self_attn", "layers.0-3.norm2"}),
        pytest.param(f"ranks --view charges {JOB}", [], {"model.layers.0-3.self_attn", "model.layers.0-3.mlp"},
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranked_tables_fold_too(line, said, into, tmp_path, monkeypatch):
    """Tables that are ranked by cost and have other columns beside the layer."""
    monkeypatch.chdir(tmp_path)
    unpacked("snapshots/run-2.11.pickle.xz", Path("run.pickle"))
    words = on_data(line)
    folded = table(*words, "--fold")
    assert all(one in folded for one in said)
    assert not said or "--no-fold prints one line per block." in " ".join(folded.split())
    assert " x4" not in table(*words) and " x6" not in table(*words)  # fewer than 8 equal blocks stay as they are
    plain, marked = rows(*words), rows(*words, "--fold")
    assert len(plain) == len(marked) and "folded_into" not in plain[0]
    assert into <= {row["folded_into"] for row in marked}


def test_folded_figures_are_those_of_all_the_blocks():
    result = nvprof_kit.open(DATA / "flops" / "llama12-2024.2.sqlite.xz").flops().selected(fold=True)
    told = result.printed()
    (row,) = told[(told["layer"] == "model.layers.0-11") & (told["phase"] == "backward")].to_dict("records")
    blocks = result.rows["layer"].str.fullmatch(r"model\.layers\.\d+") & (result.rows["phase"] == "backward")
    each, busy = result.rows[blocks], result.rows[blocks]["gpu_busy_ns"]
    assert row["flops"] == pytest.approx(each["flops"].sum())
    assert row["tflops_per_s"] == pytest.approx(each["flops"].sum() / busy.sum() / 1000)
    assert each["mfu"].min() <= row["mfu"] <= each["mfu"].max()
    assert (row["count"], row["gpu_busy_ns"]) == (12, busy.sum())
    assert (row["min_ns"], row["max_ns"]) == (busy.min(), busy.max())


def test_sorting_tables_of_which_one_has_the_column(capture):
    assert "Launches" in table("breakdown", capture, "--sort", "short_ops")


def test_metrics_timers_memory_and_plots_of_some_steps(capture, tmp_path):
    path = str(DATA / "metrics" / "llama-2023.4.sqlite.xz")
    whole, some = ({row["layer"]: int(row["busy_ns"]) for row in rows("metrics", path, *words)} for words in (
        (), ("--steps", "+1:")))  # fmt: skip
    assert some and all(busy_ns < whole[layer] for layer, busy_ns in some.items())
    done = CliRunner().invoke(group, ["metrics", path, "--steps", "900:"])
    assert "none of the requested steps is in it" in str(done.exception)

    assert int(nvprof_kit.open(capture).plot(steps=StepOptions(first=2)).rows["start_ns"].min()) >= 200_000
    table("plot", capture, "--steps", "1:", "-o", str(tmp_path / "out.png"))

    timer_log.write(tmp_path, 0, *(("forward", 1000 * number, 900, number) for number in range(100, 105)))
    (row,) = rows("timers", str(tmp_path), "--steps", "2:4")
    assert (row["calls"], row["cuda_mean_ns"]) == ("2", "102500000")  # 102 and 103 ms
    (row,) = rows("timers", str(tmp_path), "--steps", "+4:")
    assert row["calls"] == "1"

    pickled = unpacked("snapshots/run-2.11.pickle.xz", tmp_path / "run.pickle")
    by_step = rows("memory", str(pickled), "--by", "step")
    assert len(by_step) > 1 and rows("memory", str(pickled), "--by", "step", "--steps", "+1:") == by_step[1:]


def test_issues_come_once_the_severest_first_and_what_is_small_is_not_printed():
    issues = [
        Issue("open-ranges", "note", 0.2, "3 ranges were still open"),
        Issue("outside-steps", "note", 0.009, "42 of 4,713 operations are outside steps"),
        Issue("unlaunched", "warning", 0.5, "900 of 1713 operations were launched where no layer was open"),
        Issue("lost-kernels", "error", 0.001, "nsys dropped 3 events; record less at once"),
        Issue("open-ranges", "note", 0.2, "3 ranges were still open"),
    ]
    assert in_order(issues) == (issues[3], issues[2], issues[0], issues[1])
    assert printed(issues) == (issues[3], issues[2], issues[0])
    copied = pickle.loads(pickle.dumps(issues[1]))
    assert (copied, copied.code, copied.severity, copied.share) == (issues[1], "outside-steps", "note", 0.009)
