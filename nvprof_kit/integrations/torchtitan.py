"""torchtitan: a `Profiler` in place of its own, and a post-processor of the traces that its own writes.

```python
from nvprof_kit.integrations import torchtitan as layers
config.profiler = layers.LayerProfiler.Config(schedule="10:13")
```

Or, with torchtitan's profiler as it is, a table of layers beside each trace:

```python
config.profiler = Profiler.Config(enable_profiling=True, trace_post_processor=Function.Config(fn=layers.write_layers))
```
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.tools.profiler import Profiler

from nvprof_kit.integrations._host.callers import calling_object
from nvprof_kit.integrations._host.guard import never_fails, warn
from nvprof_kit.integrations._host.loop import HostLoop


class LayerProfiler(Profiler):  # type: ignore[misc]  # torchtitan may be missing
    """Ranges the layers of the trained model parts, and the steps, phases and micro-batches of torchtitan's trainer.

    torchtitan's own profiler goes on working, if its configuration enables it; only one of the two can record with
    PyTorch's profiler, so give a ``schedule`` or ``enable_profiling``, not both.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):  # type: ignore[misc]
        """torchtitan's configuration of its profiler, and ours.

        Attributes:
            schedule: Which steps to record, as text (`nvprof_kit.Schedule.parse`); empty leaves it to the environment.
            trace: Trace of the embedded recorder; empty for ``run.json.gz``.
            depth: As in `nvprof_kit.annotate_model`: levels to range, or -1 for blocks and their children.
        """

        schedule: str = ""
        trace: str = ""
        depth: int = -1

    def __enter__(self) -> Any:
        """The training begins: the trainer that calls has the model."""
        entered = super().__enter__()
        config = self._config
        annotation = {} if config.depth < 0 else {"depth": config.depth}
        self._loop = _TrainerLoop(config.schedule or None, path=config.trace or None, annotation=annotation)
        self._loop.begin_training(calling_object("model_parts"), self._global_step)
        return entered

    def step(self) -> None:
        """A step of the trainer is over."""
        super().step()
        self._loop.step_end()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        """The training is over, perhaps by an exception."""
        self._loop.end()
        return bool(super().__exit__(kind, error, traceback))


class _TrainerLoop(HostLoop):
    @never_fails
    def begin_training(self, trainer: Any, global_step: int) -> None:
        """The training begins after so many steps."""
        if trainer is None:
            raise LookupError("no trainer with model_parts among the callers")
        self.accumulation = getattr(trainer, "gradient_accumulation_steps", 1)
        self.begin(list(trainer.model_parts), first=global_step + 1)


def write_layers(trace_path: str) -> None:
    """Write the table of layers beside a trace, ``rank0_trace.layers.csv``: a post-processor of torchtitan's traces.

    Args:
        trace_path: The trace.
    """
    try:
        import subprocess
        import sys

        path = Path(trace_path)
        table = path.with_name(f"{path.name.partition('.json')[0]}.layers.csv")
        command = [sys.executable, "-m", "nvprof_kit", "layers", str(path), "-o", str(table)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            warn(f"no table of {trace_path}: {done.stderr.strip() or done.returncode}")
    except Exception as error:  # the training goes on
        warn(f"no table of {trace_path} ({type(error).__name__}: {error})")
