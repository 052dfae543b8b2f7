"""Lightning: callbacks for `Trainer` and `Fabric`, and a `Profiler` for further phases.

```python
from nvprof_kit.integrations.lightning import LayerCallback
trainer = lightning.Trainer(..., callbacks=[LayerCallback()])
```

If a tool is attached or a schedule is set, the entry points ``lightning.pytorch.callbacks_factory`` and
``lightning.fabric.callbacks_factory`` add the callback automatically.
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

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.loop import phase
from nvprof_kit._instrument.loop.schedule import Switch
from nvprof_kit._instrument.modules.blocks import Submodule, children
from nvprof_kit._instrument.patches import Guarded, never_fails
from nvprof_kit.integrations._host import HostLoop
from nvprof_kit.integrations.fabric import FabricCallback

__all__ = ["FabricCallback", "LayerCallback", "LayerProfiler"]


class LayerCallback(Callback):  # type: ignore[misc]  # the package may be missing
    """Range the layers of the module, and steps, phases, micro-batches and evaluations.

    A step is an optimizer step; with ``accumulate_grad_batches`` it contains several micro-batches, each with its own
    range. Sanity check, validation, test and prediction are the phase ``eval``, between steps.

    Args:
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`.
        path: Trace file of the embedded recorder; ``run.json.gz`` by default.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is invalid.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = _TrainerLoop(schedule, path=path, annotation=annotation)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A stage (fit, validate, test, predict) begins."""
        if stage != "fit":
            self.loop.begin_with(pl_module)

    def teardown(self, _trainer: Any, _pl_module: Any, stage: str) -> None:
        """The stage has ended."""
        self.loop.end()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is on its device."""
        self.loop.accumulation = trainer.accumulate_grad_batches
        self.loop.begin_with(pl_module, first=trainer.global_step)

    def on_train_batch_end(self, trainer: Any, _pl_module: Any, _outputs: Any, _batch: Any, _batch_idx: int) -> None:
        """End a micro-batch, and the step if the optimizer has stepped."""
        self.loop.batch_ends(trainer.global_step)

    def on_validation_start(self, _trainer: Any, _pl_module: Any) -> None:
        """An evaluation begins."""
        self.loop.evaluation_begins()

    def on_validation_end(self, _trainer: Any, _pl_module: Any) -> None:
        """An evaluation has ended."""
        self.loop.evaluation_ends()

    on_sanity_check_start = on_test_start = on_predict_start = on_validation_start
    on_sanity_check_end = on_test_end = on_predict_end = on_validation_end

    def on_exception(self, _trainer: Any, _pl_module: Any, _exception: BaseException) -> None:
        """The run fails; write what was recorded."""
        self.loop.end()


class _TrainerLoop(HostLoop):
    @never_fails
    def begin_with(self, pl_module: Any, first: int = 0) -> None:
        """Begin the loop; ``training_step`` may call the parts of the module directly, so they are watched too."""
        parts = [child.module for child in children(Submodule("", pl_module))]
        self.begin(pl_module, first=first, entered=[child for child in parts if any(True for _ in child.parameters())])

    @never_fails
    def batch_ends(self, global_step: int) -> None:
        """A batch has ended, after this many optimizer steps."""
        if self.optimizer_has_stepped or global_step > self.number:
            self.step_end()


class LayerProfiler(Profiler, Guarded):  # type: ignore[misc]  # the package may be missing
    """Range actions that Lightning profiles as phases of the loop: ``Trainer(profiler=LayerProfiler())``.

    `LayerCallback` ranges layers and steps. This profiler adds actions that callbacks do not see: checkpoint saving,
    gradient clipping and learning rate schedulers.
    """

    ACTIONS = ("save_checkpoint", "configure_gradient_clipping", "lr_scheduler_step")

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, Any]] = []

    @never_fails
    def start(self, action_name: str) -> None:
        """An action begins."""
        name = action_name.rpartition(".")[2]
        if session.backend is not None and name in self.ACTIONS:
            scope = phase(name)
            scope.__enter__()
            self._open.append((action_name, scope))

    @never_fails
    def stop(self, action_name: str) -> None:
        """An action has ended."""
        if self._open and self._open[-1][0] == action_name:
            self._open.pop()[1].__exit__(None, None, None)
