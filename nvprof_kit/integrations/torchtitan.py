"""torchtitan: a `Profiler` that replaces its own.

```python
from nvprof_kit.integrations import torchtitan as layers
config.profiler = layers.LayerProfiler.Config(schedule="10:13")
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.tools.profiler import Profiler

from nvprof_kit.integrations._host import HostLoop, calling_object


class LayerProfiler(Profiler):  # type: ignore[misc]  # torchtitan may be missing
    """Range the layers of the trained model parts, and steps, phases and micro-batches of torchtitan's trainer.

    torchtitan's own profiler still works if its configuration enables it. Only one of the two can record with PyTorch's
    profiler, so set either ``schedule`` or ``enable_profiling``, not both.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):  # type: ignore[misc]
        """The configuration of torchtitan's profiler, with additional fields.

        Attributes:
            schedule: Which steps to record, as text for `nvprof_kit.Schedule.parse`; empty reads the environment.
            trace: Trace file of the embedded recorder; empty for ``run.json.gz``.
            depth: Levels of the model to range, as in `nvprof_kit.annotate_model`; -1 for blocks and their children.
        """

        schedule: str = ""
        trace: str = ""
        depth: int = -1

    def __enter__(self) -> Any:
        """Begin training; the model is taken from the calling trainer."""
        entered = super().__enter__()
        config = self._config
        annotation = {} if config.depth < 0 else {"depth": config.depth}
        self._loop = HostLoop(config.schedule or None, path=config.trace or None, annotation=annotation)
        if (trainer := calling_object("model_parts")) is None:
            self._loop.give_up(LookupError("no trainer with model_parts among the callers"))
        else:
            self._loop.accumulation = getattr(trainer, "gradient_accumulation_steps", 1)
            self._loop.begin(list(trainer.model_parts), first=self._global_step + 1)
        return entered

    def step(self) -> None:
        """End a step of the trainer."""
        super().step()
        self._loop.step_end()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        """End training, also after an exception."""
        self._loop.end()
        return bool(super().__exit__(kind, error, traceback))
