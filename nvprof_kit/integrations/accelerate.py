"""Hugging Face Accelerate: a handler for `Accelerator.profile`.

```python
from nvprof_kit.integrations.accelerate import LayerProfileKwargs
with accelerator.profile(LayerProfileKwargs(schedule="5:8")) as profiler:
    for batch in loader:
        ...
        profiler.step()
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import ProfileKwargs

from nvprof_kit._instrument.loop.switch import Switch
from nvprof_kit._instrument.ranks import rank
from nvprof_kit.integrations._host.callers import calling_object
from nvprof_kit.integrations._host.guard import never_fails
from nvprof_kit.integrations._host.loop import HostLoop


@dataclass
class LayerProfileKwargs(ProfileKwargs):  # type: ignore[misc]  # accelerate has no types
    """Has `Accelerator.profile` range the layers, steps, phases and micro-batches of the prepared models.

    Enter ``accelerator.profile(…)`` after ``accelerator.prepare``. Accelerate's list of ``kwargs_handlers`` takes no
    subclasses of its own handlers, so it goes here. A step is an optimizer's step: while Accelerate
    accumulates gradients, ``profiler.step()`` ends a micro-batch. A program that never calls it has steps too: each
    is over when an optimizer has stepped and the next batch is fetched.

    Attributes:
        schedule: Which steps to record, as `loop.HostLoop` takes it.
        path: Trace of the embedded recorder. With ``output_trace_dir`` it is ``run.rank0.json.gz`` in there.
        annotation: Options of `nvprof_kit.annotate_model`.
    """

    schedule: Switch = None
    path: str | Path | None = None
    annotation: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """What `Accelerator.profile` enters; called by it.

        Raises:
            UsageError: The schedule is none.
        """
        path = self.path
        if path is None and self.output_trace_dir is not None:
            Path(self.output_trace_dir).mkdir(parents=True, exist_ok=True)
            path = Path(self.output_trace_dir) / f"run.rank{rank()}.json.gz"
        loop = HostLoop(self.schedule, path=path, annotation=self.annotation, own_steps=True)
        return LayerProfiler(loop, calling_object("_models"))


class LayerProfiler:
    """What ``with accelerator.profile(LayerProfileKwargs()) as profiler:`` gives.

    Args:
        loop: The loop that it ranges.
        accelerator: The accelerator whose models it calls.
    """

    def __init__(self, loop: HostLoop, accelerator: Any) -> None:
        self.loop = loop
        self._accelerator = accelerator

    def __enter__(self) -> LayerProfiler:
        _begin(self.loop, self._accelerator)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.loop.end()

    def step(self) -> None:
        """An iteration of the loop is over: the step, unless gradients go on being accumulated."""
        if self._accelerator is None or self._accelerator.sync_gradients:
            self.loop.step_end()

    def export_chrome_trace(self, _path: str) -> None:
        """Called by Accelerate where it has a folder for traces: the recorder has written its trace there already."""


def _begin(loop: HostLoop, accelerator: Any) -> None:
    @never_fails
    def begin(loop: HostLoop) -> None:
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        if not models:
            raise LookupError("the accelerator has no model; call accelerator.prepare before accelerator.profile")
        loop.accumulation = accelerator.gradient_accumulation_steps
        loop.begin(models)

    begin(loop)
