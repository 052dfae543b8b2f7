"""Lightning: callbacks for `Trainer` and `Fabric`.

```python
from nvprof_kit.integrations.lightning import LayerCallback
trainer = lightning.Trainer(..., callbacks=[LayerCallback()])
```

If a tool is attached or a schedule is set, the entry points ``lightning.pytorch.callbacks_factory`` and
``lightning.fabric.callbacks_factory`` add the callback automatically.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # installed under its older name
    from pytorch_lightning import Callback

from nvprof_kit._instrument.modules.blocks import Submodule, children
from nvprof_kit._instrument.patches import never_fails
from nvprof_kit.integrations._host import Hosted, HostLoop
from nvprof_kit.integrations.fabric import FabricCallback

__all__ = ["FabricCallback", "LayerCallback"]


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


class LayerCallback(Hosted, Callback):  # type: ignore[misc]  # the package may be missing
    """Range the layers of the module, and steps, phases, micro-batches and evaluations.

    A step is an optimizer step; with ``accumulate_grad_batches`` it contains several micro-batches, each with its own
    range. Sanity check, validation, test and prediction are the phase ``eval``, between steps. The
    arguments are those of `Hosted`.
    """

    loop: _TrainerLoop
    loop_type = _TrainerLoop
    teardown = on_exception = Hosted.close

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A stage (fit, validate, test, predict) begins."""
        if stage != "fit":
            self.loop.begin_with(pl_module)

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
