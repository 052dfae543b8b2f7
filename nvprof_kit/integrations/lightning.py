"""Lightning: a callback for its `Trainer` and for `Fabric`, and a `Profiler` for who prefers that.

```python
from nvprof_kit.integrations.lightning import LayerCallback
trainer = lightning.Trainer(..., callbacks=[LayerCallback()])
```

While somebody listens, the entry points ``lightning.pytorch.callbacks_factory`` and
``lightning.fabric.callbacks_factory`` put the callback in by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.profilers import Profiler
except ImportError:  # installed under its older name
    from pytorch_lightning import Callback
    from pytorch_lightning.profilers import Profiler

from nvprof_kit._instrument.loop.loop import phase
from nvprof_kit._instrument.loop.switch import Switch
from nvprof_kit._instrument.modules.blocks import Part, children
from nvprof_kit._instrument.ranges import state
from nvprof_kit.integrations._host.guard import Guarded, never_fails
from nvprof_kit.integrations._host.loop import HostLoop


class LayerCallback(Callback):  # type: ignore[misc]  # the package may be missing
    """Ranges the layers of the module, and its steps, phases, micro-batches and evaluations.

    A step is an optimizer's step: under ``accumulate_grad_batches`` it holds several micro-batches, each ranged. The
    sanity check, validation, test and prediction are the phase ``eval``, between steps.

    Args:
        schedule: Which steps to record, as `loop.HostLoop` takes it.
        path: Trace of the embedded recorder, ``run.json.gz`` by default.
        annotation: Options of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is none.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = _TrainerLoop(schedule, path=path, annotation=annotation)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fit, validation, test or prediction begins."""
        if stage != "fit":
            self.loop.begin_with(pl_module)

    def teardown(self, _trainer: Any, _pl_module: Any, stage: str) -> None:
        """It is over."""
        self.loop.end()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is where it will be trained."""
        self.loop.accumulation = trainer.accumulate_grad_batches
        self.loop.begin_with(pl_module, first=trainer.global_step)

    def on_train_batch_end(self, trainer: Any, _pl_module: Any, _outputs: Any, _batch: Any, _batch_idx: int) -> None:
        """A micro-batch is over; if the optimizer has stepped, the step is."""
        self.loop.batch_ends(trainer.global_step)

    def _evaluation_begins(self, _trainer: Any, _pl_module: Any) -> None:
        self.loop.evaluation_begins()

    def _evaluation_ends(self, _trainer: Any, _pl_module: Any) -> None:
        self.loop.evaluation_ends()

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = _evaluation_begins
    on_sanity_check_end = on_validation_end = on_test_end = on_predict_end = _evaluation_ends

    def on_exception(self, _trainer: Any, _pl_module: Any, _exception: BaseException) -> None:
        """The run ends early: what was recorded is written."""
        self.loop.end()


class _TrainerLoop(HostLoop):
    @never_fails
    def begin_with(self, pl_module: Any, first: int = 0) -> None:
        """The loop begins with a module whose ``training_step`` calls its parts, and the module itself or not."""
        parts = [part.module for part in children(Part("", pl_module))]
        self.begin(pl_module, first=first, entered=[part for part in parts if any(True for _ in part.parameters())])

    @never_fails
    def batch_ends(self, global_step: int) -> None:
        """A batch is over, after so many steps of the optimizer."""
        if self.optimizer_has_stepped or global_step > self.number:
            self.step_end()


class FabricCallback:
    """Ranges a loop around `Fabric`: ``Fabric(callbacks=[FabricCallback()])``.

    It begins with ``fabric.setup(model, …)``. Fabric knows no steps: one is over when an optimizer has stepped and the
    next batch is fetched or the model is called.

    Args:
        schedule: Which steps to record, as `loop.HostLoop` takes it.
        path: Trace of the embedded recorder, ``run.json.gz`` by default.
        annotation: Options of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is none.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = HostLoop(schedule, path=path, annotation=annotation, own_steps=True)

    def on_after_setup(self, module: Any) -> None:
        """A model is set up; the first is the one whose steps count."""
        if not self.loop.runs:
            self.loop.begin(getattr(module, "_original_module", module))

    def close(self) -> None:
        """The loop is over; what was recorded is written. The process's end does it too."""
        self.loop.end()


class LayerProfiler(Profiler, Guarded):  # type: ignore[misc]  # the package may be missing
    """Ranges actions that Lightning itself profiles, as phases of the loop: ``Trainer(profiler=LayerProfiler())``.

    The layers and steps come from `LayerCallback`; this adds what no callback sees, the saving of checkpoints, the
    clipping of gradients and the schedulers of learning rates.
    """

    ACTIONS = ("save_checkpoint", "configure_gradient_clipping", "lr_scheduler_step")

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, Any]] = []

    @never_fails
    def start(self, action_name: str) -> None:
        """An action begins."""
        name = action_name.rpartition(".")[2]
        if state.backend is not None and name in self.ACTIONS:
            scope = phase(name)
            scope.__enter__()
            self._open.append((action_name, scope))

    @never_fails
    def stop(self, action_name: str) -> None:
        """It is over."""
        if self._open and self._open[-1][0] == action_name:
            self._open.pop()[1].__exit__(None, None, None)
