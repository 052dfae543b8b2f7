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

from nvprof_kit._instrument.patches import never_fails
from nvprof_kit.integrations._host import Hosted
from nvprof_kit.integrations.fabric import FabricCallback

__all__ = ["FabricCallback", "LayerCallback"]


class LayerCallback(Hosted, Callback):  # type: ignore[misc]  # the package may be missing
    """Range the layers of the module, and steps, phases, micro-batches and evaluations.

    A step is an optimizer step; with ``accumulate_grad_batches`` it contains several micro-batches, each with its own
    range. Sanity check, validation, test and prediction are the phase ``eval``, between steps. The
    arguments are those of `Hosted`.
    """

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = Hosted.evaluation_begins
    on_sanity_check_end = on_validation_end = on_test_end = on_predict_end = Hosted.evaluation_ends
    teardown = on_exception = Hosted.close

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A stage (fit, validate, test, predict) begins."""
        if stage != "fit":
            self.loop.begin(pl_module, with_parts=True)

    @never_fails
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is on its device; ``training_step`` may call its parts directly, so they are watched too."""
        self.loop.accumulation = trainer.accumulate_grad_batches
        self.loop.begin(pl_module, first=trainer.global_step, with_parts=True)

    @never_fails
    def on_train_batch_end(self, trainer: Any, _pl_module: Any, _outputs: Any, _batch: Any, _batch_idx: int) -> None:
        """End a micro-batch, and the step if the optimizer has stepped."""
        if self.loop.optimizer_has_stepped or trainer.global_step > self.loop.number:
            self.loop.step_end()
