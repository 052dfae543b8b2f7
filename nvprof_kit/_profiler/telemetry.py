"""A sampled window as gauges of a monitoring system, Prometheus's or OpenTelemetry's.

Nothing here opens a socket: a program that is scraped has a server of its own, one that pushes an exporter of its own,
and for others there is a file that the node exporter reads.
"""

from __future__ import annotations

import importlib
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._instrument.ranks import rank
from nvprof_kit.errors import ToolError

if TYPE_CHECKING:
    from nvprof_kit._analysis.telemetry import Sample


class Gauge(NamedTuple):
    """A gauge: its names in both systems, its unit by OpenTelemetry, what it is, and its labels beside ``rank``."""

    prometheus: str
    opentelemetry: str
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()


GAUGES = {
    "layer": Gauge(
        "nvprof_kit_layer_seconds",
        "nvprof_kit.layer.time",
        "s",
        "Time of the operations of a kind of layer in a step of the last sampled window",
        ("kind", "phase", "device"),
    ),
    "step": Gauge("nvprof_kit_step_seconds", "nvprof_kit.step.time", "s", "Length of a step of that window"),
    "busy": Gauge("nvprof_kit_gpu_busy_ratio", "nvprof_kit.gpu.busy", "1", "Share of it in which the GPU had work"),
    "in_layers": Gauge(
        "nvprof_kit_in_layers_ratio", "nvprof_kit.in_layers", "1", "Share of the operations' time in a named layer"
    ),
    "last_step": Gauge("nvprof_kit_window_last_step", "nvprof_kit.window.last_step", "1", "Last step of that window"),
    "at": Gauge(
        "nvprof_kit_window_timestamp_seconds", "nvprof_kit.window.timestamp", "s", "When it was read, since 1970"
    ),
}
"""The gauges by what they tell."""

Point = tuple[dict[str, str], float]
"""Labels and value."""


def points(found: Sample, window: Window) -> dict[str, list[Point]]:
    """The points of each of `GAUGES`; none where there is nothing to tell."""
    mine = {"rank": str(rank())}
    single = {"step": found.step, "busy": found.busy, "in_layers": found.in_layers,
              "last_step": float(window.last_step), "at": time.time()}  # fmt: skip
    return {
        "layer": [
            ({"kind": kind, "phase": phase, "device": found.device, **mine}, value)
            for (kind, phase), value in found.layers.items()
        ],
        **{name: [] if value is None else [(mine, value)] for name, value in single.items()},
    }


class Gauges(ABC):
    """Reads each window and shows it; whatever goes wrong is a warning.

    Args:
        kinds: How many kinds of layers are told apart.
    """

    def __init__(self, kinds: int) -> None:
        from nvprof_kit._analysis.telemetry import Labels

        self._labels = Labels(kinds)

    def __call__(self, trace: Path, window: Window) -> None:
        """A window's trace is ready."""
        try:
            from nvprof_kit._analysis.telemetry import sample
            from nvprof_kit._trace.open import open_capture

            self.show(points(sample(open_capture(trace), self._labels), window))
        except Exception as error:
            warnings.warn(f"no telemetry of {window}: {type(error).__name__}: {error}", stacklevel=2)

    @abstractmethod
    def show(self, found: dict[str, list[Point]]) -> None:
        """What the last window says, in place of the one before."""


class PrometheusGauges(Gauges):
    """Gauges of a registry, and a file of them."""

    def __init__(self, registry: Any, folder: Path | None, kinds: int) -> None:
        super().__init__(kinds)
        self._library = _library("prometheus_client")
        if registry is None:
            registry = self._library.CollectorRegistry() if folder is not None else self._library.REGISTRY
        self._registry, self._folder = registry, folder
        if registry not in _registered:  # a second handler of one registry shows its windows by the same gauges
            _registered[registry] = {
                name: self._library.Gauge(gauge.prometheus, gauge.meaning, [*gauge.labels, "rank"], registry=registry)
                for name, gauge in GAUGES.items()
            }

    def show(self, found: dict[str, list[Point]]) -> None:
        """Set the gauges, those of labels that are gone no longer, and write the file."""
        for name, gauge in _registered[self._registry].items():
            gauge.clear()
            for labels, value in found[name]:
                gauge.labels(**labels).set(value)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # written beside its place and renamed: the node exporter reads all of it or none
            self._library.write_to_textfile(str(self._folder / f"nvprof_kit_rank{rank()}.prom"), self._registry)


_registered: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class OtlpGauges(Gauges):
    """Observable gauges of a meter provider: its readers ask for them when they export."""

    def __init__(self, provider: Any, kinds: int) -> None:
        super().__init__(kinds)
        self._library = _library("opentelemetry.metrics")
        self._found: dict[str, list[Point]] = {name: [] for name in GAUGES}
        meter = (provider or self._library.get_meter_provider()).get_meter("nvprof_kit")
        for name, gauge in GAUGES.items():
            meter.create_observable_gauge(
                gauge.opentelemetry, callbacks=[self._asked(name)], unit=gauge.unit, description=gauge.meaning
            )

    def show(self, found: dict[str, list[Point]]) -> None:
        """Keep what is to be exported."""
        self._found = found

    def _asked(self, name: str) -> Any:
        def observe(_options: object) -> Iterator[Any]:
            shown: Sequence[Point] = self._found[name]
            for labels, value in shown:
                yield self._library.Observation(value, dict(labels))

        return observe


def _library(name: str) -> Any:
    """A library of the extra.

    Raises:
        ToolError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = {"opentelemetry.metrics": "opentelemetry-sdk"}.get(name, name.replace("_", "-"))
        raise ToolError(f'{package} is not installed; pip install "nvprof-kit[telemetry]"') from None
