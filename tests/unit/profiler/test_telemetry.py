"""A sampled window as gauges, by the libraries themselves."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch
from support.captures.nsys_file import NsysFile

from nvprof_kit import Schedule, ToolError, annotate_model, handlers, scheduled, step
from nvprof_kit._analysis.telemetry import OTHERS, Labels, kind_of, sample
from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._trace.open import open_capture

prometheus_client = pytest.importorskip("prometheus_client")
sdk = pytest.importorskip("opentelemetry.sdk.metrics")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Two steps of 1000 ns."""
    file = NsysFile(tmp_path / "run.sqlite")
    for number in (0, 1):
        at = 1000 * number
        file.range_(f"step {number}", at, at + 1000, category="step", payload=number)
        for layer in (0, 1):
            begin = at + 10 + 40 * layer
            file.range_(f"layers.{layer}.mlp", begin, begin + 30)
            file.kernel(begin + 100, begin + 130 + 10 * layer + 20 * number, launched=(begin + 1, begin + 5))
        file.range_("optimizer", at + 200, at + 300, category="optimizer")
        file.kernel(at + 400, at + 460, launched=(at + 210, at + 215))
    file.kernel(5000, 5999, launched=(4000, 4001))  # outside steps
    return file.write()


LAYERS = {("layers.*.mlp", "forward"): 90e-9, ("(none)", "optimizer"): 60e-9}
"""Step 0: 30 + 40 in the layers, step 1: 50 + 60, by the mean (70 + 110) / 2; 60 in each optimizer."""


def test_a_sample(capture: Path) -> None:
    found = sample(open_capture(capture), Labels(32))
    assert found.layers == pytest.approx(LAYERS) and found.device == "gpu"
    assert found.in_layers == pytest.approx(180 / 300)
    assert found.step is not None and found.busy is not None and 0 < found.busy < 1


@pytest.mark.parametrize(
    ("layer", "kind"),
    [("h.11.mlp.0", "h.*.mlp.*"), ("layer4.conv2d", "layer4.conv2d"), ("(none)", "(none)"), ("0", "*")],
)
def test_kinds(layer: str, kind: str) -> None:
    assert kind_of(layer) == kind


def test_labels_are_bounded_and_stay_what_they_were() -> None:
    labels = Labels(3)
    assert [labels.kind(one) for one in ("a", "b", "c", "a", "(none)", "d")] == [
        "a",
        "b",
        OTHERS,
        "a",
        "(none)",
        OTHERS,
    ]
    assert {labels.phase(f"phase {number}") for number in range(100)} >= {"phase 0", OTHERS}
    assert len({labels.phase(f"phase {number}") for number in range(1000)}) <= 17


def test_a_registry_that_is_scraped(capture: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    handler = handlers.prometheus(registry)
    handler(capture, Window(0, 0, 1))
    labels = {"kind": "layers.*.mlp", "phase": "forward", "device": "gpu", "rank": "0"}
    assert registry.get_sample_value("nvprof_kit_layer_seconds", labels) == pytest.approx(90e-9)
    assert registry.get_sample_value("nvprof_kit_window_last_step", {"rank": "0"}) == 1
    text = prometheus_client.generate_latest(registry).decode()
    assert text.count("\nnvprof_kit_layer_seconds{") == 2 and "nvprof_kit_step_seconds{rank=" in text
    handlers.prometheus(registry)(capture, Window(0, 2, 3))  # a second one shows its windows by the same gauges
    assert registry.get_sample_value("nvprof_kit_window_last_step", {"rank": "0"}) == 3


def test_what_is_gone_is_no_longer_shown(capture: Path, tmp_path: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    handler = handlers.prometheus(registry)
    handler(capture, Window(0, 0, 1))
    file = NsysFile(tmp_path / "later.sqlite")
    file.range_("head", 0, 100)
    file.kernel(200, 300, launched=(10, 20))
    handler(file.write(), Window(0, 9, 9))
    text = prometheus_client.generate_latest(registry).decode()
    assert 'kind="head"' in text and "layers.*" not in text
    assert "\nnvprof_kit_step_seconds{" not in text  # a window without steps has no length of one


def test_a_file_for_the_node_exporter(capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    handlers.prometheus(folder=tmp_path / "textfile")(capture, Window(0, 0, 1))
    (path,) = (tmp_path / "textfile").iterdir()
    assert path.name == "nvprof_kit_rank3.prom"
    parser = pytest.importorskip("prometheus_client.parser")
    families = {one.name: one for one in parser.text_string_to_metric_families(path.read_text())}
    samples = families["nvprof_kit_layer_seconds"].samples
    found = {(one.labels["kind"], one.labels["phase"]): one.value for one in samples}
    assert found == pytest.approx(LAYERS)
    assert {one.labels["rank"] for family in families.values() for one in family.samples} == {"3"}


HOSTILE = ('a"b\\c', "two\nlines", "\x1b[31mred\x1b[0m", "right\u202eleft", "}{,=", "Ünï", "x" * 3000)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A step of 700 ns, 100 ns in each of seven layers, whose names an exporter must escape or replace."""
    file = NsysFile(tmp_path / "hostile.sqlite")
    file.range_("step 0", 0, 1000, category="step", payload=0)
    for place, name in enumerate(HOSTILE):
        file.range_(name, 100 * place, 100 * place + 20)
        file.kernel(100 * place + 20, 100 * place + 120, launched=(100 * place + 1, 100 * place + 5))
    return file.write()


KINDS = {name: name for name in HOSTILE} | {
    "two\nlines": "two lines",
    "\x1b[31mred\x1b[0m": "\ufffd[31mred\ufffd[0m",
    "right\u202eleft": "right\ufffdleft",
}


def test_names_of_the_program_are_escaped(hostile: Path, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    handlers.prometheus(folder=tmp_path / "textfile")(hostile, Window(0, 0, 0))
    (path,) = (tmp_path / "textfile").iterdir()
    families = {one.name: one for one in parser.text_string_to_metric_families(path.read_text())}
    found = {one.labels["kind"]: one.value for one in families["nvprof_kit_layer_seconds"].samples}
    assert found == pytest.approx(dict.fromkeys(KINDS.values(), 100e-9))
    reader = export.InMemoryMetricReader()
    handlers.otlp(sdk.MeterProvider(metric_readers=[reader]))(hostile, Window(0, 0, 0))
    points = _exported(reader)["nvprof_kit.layer.time"]
    assert {one["kind"]: value for one, value in points} == pytest.approx(dict.fromkeys(KINDS.values(), 100e-9))


def test_gauges_of_opentelemetry(capture: Path) -> None:
    reader = export.InMemoryMetricReader()
    handler = handlers.otlp(sdk.MeterProvider(metric_readers=[reader]))
    assert not _exported(reader)  # nothing was sampled yet
    handler(capture, Window(0, 0, 1))
    found = _exported(reader)
    layers = {(one["kind"], one["phase"]): value for one, value in found["nvprof_kit.layer.time"]}
    assert layers == pytest.approx(LAYERS)
    assert found["nvprof_kit.window.last_step"] == [({"rank": "0"}, 1.0)]


def _exported(reader: object) -> dict[str, list[tuple[dict[str, str], float]]]:
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    return {
        metric.name: [(dict(point.attributes), point.value) for point in metric.data.data_points]
        for scope in scopes
        for metric in scope.metrics
        if metric.data.data_points
    }


def test_a_loop_that_keeps_one_step_in_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: object) -> None:
        raise AssertionError("telemetry opens no socket")

    monkeypatch.setattr(socket, "socket", refused)
    registry = prometheus_client.CollectorRegistry()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    schedule = Schedule(wait=2, warmup=1, active=1, repeat=0)
    with (
        annotate_model(model),
        scheduled(schedule, tmp_path / "run.json", on_trace_ready=handlers.prometheus(registry)) as profiling,
    ):
        seen = []
        for number in range(12):
            with step(number):
                model(torch.ones(2, 4)).sum().backward()
            profiling.step()
            seen.append(registry.get_sample_value("nvprof_kit_window_last_step", {"rank": "0"}))
    assert seen == [None] * 3 + [3.0] * 4 + [7.0] * 4 + [11.0]
    samples = [one for family in registry.collect() for one in family.samples if "kind" in one.labels]
    assert {one.labels["kind"] for one in samples} == {"*", "Sequential", "(none)"}  # the blocks are 0 and 1
    assert {one.labels["device"] for one in samples} == {"cpu"}


@pytest.mark.parametrize("make", [lambda folder: handlers.prometheus(folder=folder), lambda _: handlers.otlp()])
def test_what_goes_wrong_is_a_warning(make, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.warns(UserWarning, match="no telemetry of"):
        make(tmp_path)(tmp_path / "broken.json", Window(0, 0, 1))


def test_a_folder_that_cannot_be_written_is_a_warning(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="no telemetry of"):
        handlers.prometheus(folder=tmp_path / "file")(capture, Window(0, 0, 1))


@pytest.mark.parametrize(("make", "module"), [(handlers.prometheus, "prometheus_client"),
                                              (handlers.otlp, "opentelemetry.metrics")])  # fmt: skip
def test_without_the_library(make, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ToolError, match=r'pip install "nvprof-kit\[telemetry\]"'):
        make()
