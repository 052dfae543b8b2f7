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

from nvprof_kit._instrument.loop.schedule import Switch
from nvprof_kit._instrument.ranks import rank
from nvprof_kit.integrations._host import Hosted, calling_object


@dataclass
class LayerProfileKwargs(ProfileKwargs):  # type: ignore[misc]  # accelerate has no types
    """Range the layers, steps, phases and micro-batches of the prepared models in `Accelerator.profile`.

    Enter ``accelerator.profile(…)`` after ``accelerator.prepare``, and pass this object to it: ``kwargs_handlers`` does
    not accept subclasses of Accelerate's handlers. A step is an optimizer step; during gradient accumulation,
    ``profiler.step()`` ends a micro-batch. Calling ``profiler.step()`` is optional: without it, a step ends when an
    optimizer has stepped and the next batch is fetched.

    Attributes:
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`.
        path: Trace file of the embedded recorder; with ``output_trace_dir``, ``run.rank0.json.gz`` in that folder.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`.
    """

    schedule: Switch = None
    path: str | Path | None = None
    annotation: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Called by `Accelerator.profile`; returns the context manager that it enters.

        Raises:
            UsageError: The schedule is invalid.
        """
        path = self.path
        if path is None and self.output_trace_dir is not None:
            Path(self.output_trace_dir).mkdir(parents=True, exist_ok=True)
            path = Path(self.output_trace_dir) / f"run.rank{rank()}.json.gz"
        return LayerProfiler(calling_object("_models"), self.schedule, path, **self.annotation)


class LayerProfiler(Hosted):
    """The ``profiler`` of ``with accelerator.profile(LayerProfileKwargs()) as profiler:``.

    Args:
        accelerator: The accelerator with the prepared models.
        schedule: As of `Hosted`.
        path: As of `Hosted`.
        annotation: As of `Hosted`.
    """

    own_steps = True

    def __init__(self, accelerator: Any, schedule: Switch, path: str | Path | None, **annotation: Any) -> None:
        super().__init__(schedule, path, **annotation)
        self._accelerator = accelerator
        try:
            models = [accelerator.unwrap_model(model) for model in accelerator._models]
            if not models:
                raise LookupError("the accelerator has no model; call accelerator.prepare before accelerator.profile")
            self.loop.accumulation = accelerator.gradient_accumulation_steps
            self.loop.begin(models)
        except Exception as error:  # the program must run without ranges
            self.give_up(error)

    def step(self) -> None:
        """End an iteration; it ends the step unless gradients are still being accumulated."""
        if self._accelerator is None or self._accelerator.sync_gradients:
            self.loop.step_end()

    def export_chrome_trace(self, _path: str) -> None:
        """Called by Accelerate with a trace folder; does nothing, the recorder has already written the trace."""
