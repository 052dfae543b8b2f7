"""Export of a window as Prometheus or OpenTelemetry gauges.

Nothing here opens a socket: scraping needs a server and pushing needs an exporter in the program; otherwise there is a
file for the node exporter.
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
from nvprof_kit._result.plain import title
from nvprof_kit.errors import ToolError

if TYPE_CHECKING:
    from nvprof_kit._analysis.telemetry import Sample


class Gauge(NamedTuple):
    """A gauge: its names in both systems, OpenTelemetry unit, description, and labels besides ``rank``."""

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
"""The gauges by key."""

Point = tuple[dict[str, str], float]
"""Label values and value."""


def points(found: Sample, window: Window) -> dict[str, list[Point]]:
    """The points of each of `GAUGES`; empty without data."""
    mine = {"rank": str(rank())}
    layers: dict[tuple[str, str], float] = {}
    for (kind, phase), value in found.layers.items():
        key = title(kind), title(phase)  # names come from the program
        layers[key] = layers.get(key, 0.0) + value
    single = {"step": found.step, "busy": found.busy, "in_layers": found.in_layers,
              "last_step": float(window.last_step), "at": time.time()}  # fmt: skip
    return {
        "layer": [
            ({"kind": kind, "phase": phase, "device": found.device, **mine}, value)
            for (kind, phase), value in layers.items()
        ],
        **{name: [] if value is None else [(mine, value)] for name, value in single.items()},
    }


class Gauges(ABC):
    """Reads each window and exports it; failures become warnings.

    Args:
        kinds: Maximum number of layer kinds.
    """

    def __init__(self, kinds: int) -> None:
        from nvprof_kit._analysis.telemetry import Labels

        self._labels = Labels(kinds)

    def __call__(self, trace: Path, window: Window) -> None:
        """Handle the trace of a window."""
        try:
            from nvprof_kit._analysis.telemetry import sample
            from nvprof_kit._trace.open import open_capture

            self.show(points(sample(open_capture(trace), self._labels), window))
        except Exception as error:
            warnings.warn(f"no telemetry of {window}: {type(error).__name__}: {error}", stacklevel=2)

    @abstractmethod
    def show(self, found: dict[str, list[Point]]) -> None:
        """Replace the values of the previous window."""


class PrometheusGauges(Gauges):
    """Gauges in a Prometheus registry, and optionally a file."""

    def __init__(self, registry: Any, folder: Path | None, kinds: int) -> None:
        super().__init__(kinds)
        self._library = _library("prometheus_client")
        if registry is None:
            registry = self._library.CollectorRegistry() if folder is not None else self._library.REGISTRY
        self._registry, self._folder = registry, folder
        if registry not in _registered:  # a second handler for one registry shares its gauges
            _registered[registry] = {
                name: self._library.Gauge(gauge.prometheus, gauge.meaning, [*gauge.labels, "rank"], registry=registry)
                for name, gauge in GAUGES.items()
            }

    def show(self, found: dict[str, list[Point]]) -> None:
        """Set the gauges, remove stale label values, and write the file."""
        for name, gauge in _registered[self._registry].items():
            gauge.clear()
            for labels, value in found[name]:
                gauge.labels(**labels).set(value)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # writes a temporary file and renames it, so the node exporter never reads a partial file
            self._library.write_to_textfile(str(self._folder / f"nvprof_kit_rank{rank()}.prom"), self._registry)


_registered: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class OtlpGauges(Gauges):
    """Observable gauges of a meter provider, read by its readers at export."""

    def __init__(self, provider: Any, kinds: int) -> None:
        super().__init__(kinds)
        self._library = _library("opentelemetry.metrics")
        self._found: dict[str, list[Point]] = {name: [] for name in GAUGES}
        meter = (provider or self._library.get_meter_provider()).get_meter("nvprof_kit")
        for name, gauge in GAUGES.items():
            meter.create_observable_gauge(
                gauge.opentelemetry, callbacks=[self._observer(name)], unit=gauge.unit, description=gauge.meaning
            )

    def show(self, found: dict[str, list[Point]]) -> None:
        """Store the values for the next export."""
        self._found = found

    def _observer(self, name: str) -> Any:
        def observe(_options: object) -> Iterator[Any]:
            shown: Sequence[Point] = self._found[name]
            for labels, value in shown:
                yield self._library.Observation(value, dict(labels))

        return observe


def _library(name: str) -> Any:
    """Import an optional library.

    Raises:
        ToolError: The library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = {"opentelemetry.metrics": "opentelemetry-sdk"}.get(name, name.replace("_", "-"))
        raise ToolError(f'{package} is not installed; pip install "nvprof-kit[telemetry]"') from None
