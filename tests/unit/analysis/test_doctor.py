"""The doctor after a run: facts of a capture in, findings out; and how the facts are read from an export."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.captures.nsys_file import NsysFile
from support.data import DATA

from nvprof_kit._analysis.doctor import examine_captures
from nvprof_kit._cli import group
from nvprof_kit._trace.nsys.health import CaptureHealth, read_health
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import Losses

KERNELS, CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
WELL = CaptureHealth(
    path="run.sqlite",
    rows={KERNELS: 100, CALLS: 300},
    domains={"nvprof_kit": 10},
    registered=("nvprof_kit",),
    processes={7: 100},
    window_ns=50_000_000,
)


def found(*captures: CaptureHealth) -> dict[str, str]:
    """What is not well in the first capture, by check."""
    first = examine_captures(captures)[captures[0].path]
    return {finding.title: finding.severity for finding in first if finding.severity != "ok"}


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"rows": {KERNELS: 0, CALLS: 300}}, "kernels", "error"),
        ({"rows": {}}, "kernels", "error"),
        ({"rows": {KERNELS: 100, CALLS: 0}}, "tables", "error"),
        ({"processes": {7: 100, 8: 0}}, "processes", "warning"),
        ({"domains": {}, "registered": ("nvprof_kit",)}, "ranges", "error"),
        ({"domains": {}, "registered": ()}, "ranges", "warning"),
        ({"domains": {"": 3, "NCCL": 30}, "registered": ()}, "ranges", "warning"),
        ({"domains": {"CCCL": 30}, "registered": ()}, "ranges", "warning"),
        ({"open_ranges": 2}, "open ranges", "note"),
        ({"without_payloads": True}, "tables", "warning"),
        ({"complaints": (("Couldn't allocate CUPTI bufer", 3, True),)}, "lost events", "error"),
        ({"complaints": (("Not all NVTX events might have been collected.", 1, False),)}, "nsys's messages", "note"),
        ({"losses": Losses(100, 26)}, "lost events", "error"),
        ({"losses": Losses(10_000, 26)}, "lost events", "note"),
        ({"homes": ("/home/ada",)}, "privacy", "note"),
        ({"complaints": (("No cuDNN events collected.", 1, False),)}, "nsys warning", "warning"),
        ({"losses": Losses(replays=5, whole_graphs=5)}, "CUDA graphs", "warning"),
        ({"losses": Losses(overhead_ns=600_000)}, "overhead", "warning"),  # 1.2 % of 50 ms
        ({"window_ns": 61_000_000_000}, "length", "note"),
        ({"environment": ("HOME", "PATH")}, "privacy", "note"),
        ({"environment": ("TOKENIZERS_PARALLELISM", "TIKTOKEN_CACHE_DIR", "XAUTHORITY")}, "privacy", "note"),
        ({"environment": ("HOME", "HF_TOKEN")}, "privacy", "warning"),
        ({"environment": ("GITHUBTOKEN", "AWS_SECRET_ACCESS_KEY", "BASIC_AUTH")}, "privacy", "warning"),
    ],
)
def test_a_finding_has_a_reason(change, check, level):
    capture = replace(WELL, **change)
    assert found(capture) == {check: level}
    findings = examine_captures([capture])["run.sqlite"]
    assert all(finding.why and finding.fix for finding in findings if finding.severity != "ok")
    assert not any(f"--domain {library}" in finding.fix for finding in findings for library in ("NCCL", "CCCL"))


@pytest.mark.parametrize(("path", "export"), [("a b.sqlite.xz", ""), ("run.nsys-rep", "run"), ("run_pqtdir", "REPORT")])
def test_what_scrubs_a_capture_can_be_followed(path, export):
    findings = examine_captures([replace(WELL, path=path, environment=("HOME",))])[path]
    export = f"nsys export -t sqlite {export}.nsys-rep && nvprof-kit scrub {export}.sqlite" if export else ""
    assert (export or "nvprof-kit scrub 'a b.sqlite.xz'") in [finding.fix for finding in findings]


@pytest.mark.parametrize(("captures", "table"), [(False, "KERNEL"), (False, "MEMCPY"), (True, "KERNEL")])
def test_a_launch_without_its_kernel_is_counted_but_not_in_a_stream_capture(captures, table, file):
    if captures:
        file.call("cudaStreamBeginCapture_v10000", 10, 20)
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 350, launched=(110, 120), table=table)
    file.call("cudaLaunchKernel_v7000", 130, 140)
    path, without = file.write(), 1 + (table == "MEMCPY")
    info = open_capture(path).info
    assert info.losses[:2] == ((0, 0) if captures else (2, without))
    lost = f"{without} of 2 kernel launches have no kernel in the capture"
    assert sum(warning.startswith(lost) for warning in info.warnings) == (not captures)
    assert ("no kernel" in ask(str(path))[1]) == (not captures)


def export(path: Path) -> Path:
    file = NsysFile(path)
    file.range_("layers.0", 100, 200, category="forward")
    file.range_("open", 100, None, category="forward")
    file.range_("other", 100, 150, category=None, domain="Megatron", pid=8)
    file.kernel(300, 350, launched=(110, 120))
    return file.write()


@pytest.mark.parametrize("capture", ["eager-2023.4", "graph-2023.4", "hooks-ddp-2024.2"])
def test_real_captures(capture):
    path = DATA / f"{capture}.sqlite.xz"
    health = read_health(path, open_capture(path))
    assert health.rows[KERNELS] > 0 and health.domains and health.domains["nvprof_kit"] > 0
    assert health.losses.whole_graphs == 0 and health.environment == ()
    findings = examine_captures([health])[str(path)]
    assert [finding.evidence for finding in findings if finding.severity == "error"] == []


def ask(*argv: str) -> tuple[int, str]:
    done = CliRunner().invoke(group, ["doctor", *argv])
    return done.exit_code, done.output


def test_the_verb(tmp_path, monkeypatch):
    path = str(export(tmp_path / "run.sqlite"))
    status, said = ask("--format", "json", path)
    rows = json.loads(said)["rows"]
    assert status == 0 and {row["subject"] for row in rows} == {path}
    assert set(rows[0]) == {"subject", "level", "check", "seen", "why", "fix"}
    status, said = ask(path)
    assert status == 0 and "processes: 1 of 2 processes ran no kernel: 8" in said
    monkeypatch.chdir(tmp_path)  # a path as a shell completes it
    assert ask("./run.sqlite") == ask("run.sqlite")
    assert "in our domain" not in ask(str(DATA / "foreign" / "torch-nvtx-2024.2.sqlite.xz"))[1], "layers reads others'"


def test_an_error_is_an_exit_status(file):
    file.range_("layers.0", 100, 200)
    status, said = ask(str(file.write()))
    assert status == 1 and said.startswith("error   kernels: no kernel and no CUDA call")
    assert ask("--format", "csv")[0] in (0, 1)


TRACES = {"foreign/kineto-modules": "warning", "foreign/kineto-stack": "ok", "kineto/ddp.rank0": "ok"}


@pytest.mark.parametrize(("trace", "level"), TRACES.items())
def test_a_trace_of_pytorch_is_checked(trace, level):
    done = CliRunner().invoke(group, ["doctor", str(DATA / f"{trace}.json.xz"), "--format", "json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert any(row["level"] == level and "calls of modules" in row["seen"] for row in rows), rows
    assert any("GPU operations" in row["seen"] for row in rows)


def test_options_behind_a_capture_and_of_a_command(tmp_path):
    path = str(export(tmp_path / "my run.sqlite"))
    status, said = ask(path, "--format", "json")
    assert status == 0 and {row["subject"] for row in json.loads(said)["rows"]} == {path}
    _, said = ask("--format", "json", "--", "python", "nope.py", "--format", "table")
    assert "'nope.py' is not found, or cannot be run" in {row["seen"] for row in json.loads(said)["rows"]}


def test_a_rank_without_kernels_is_judged_beside_the_others():
    alone = replace(WELL, path="rank1.sqlite", rows={})
    assert "other captures have kernels" in examine_captures([alone, WELL])["rank1.sqlite"][0].why


def test_all_is_well_and_what_was_not_recorded_is_said():
    assert found(WELL) == {}
    (tables,) = (one for one in examine_captures([WELL])["run.sqlite"] if one.title == "tables")
    assert tables.severity == "ok" and "(nvprof-kit profile --preset memory), GPU metrics" in tables.evidence
    everything = {**WELL.rows, "GPU_METRICS": 1, "CUDA_GPU_MEMORY_USAGE_EVENTS": 1}
    assert "tables" not in {one.title for one in examine_captures([replace(WELL, rows=everything)])["run.sqlite"]}
