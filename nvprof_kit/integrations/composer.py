"""MosaicML Composer: a callback.

```python
from nvprof_kit.integrations.composer import LayerCallback
trainer = composer.Trainer(..., callbacks=[LayerCallback()])
```
"""

from __future__ import annotations

from typing import Any

from composer import Callback

from nvprof_kit._instrument.modules.blocks import Submodule, children
from nvprof_kit._instrument.patches import never_fails
from nvprof_kit.integrations._host import Hosted, HostLoop


class _TrainerLoop(HostLoop):
    @never_fails
    def begin_training(self, state: Any) -> None:
        """Begin training; Composer calls ``ComposerModel.forward`` directly, so its parts are watched too."""
        parts = [child.module for child in children(Submodule("", state.model))]
        size, micro = state.device_train_microbatch_size, getattr(state.train_dataloader, "batch_size", None)
        self.accumulation = -(-micro // size) if isinstance(size, int) and isinstance(micro, int) else 1
        self.train_dataset = getattr(state.train_dataloader, "dataset", None)
        self.begin(state.model, first=int(state.timestamp.batch), entered=parts)


class LayerCallback(Hosted, Callback):  # type: ignore[misc]  # composer may be missing
    """Range the layers of the trained model, and steps, phases, micro-batches and evaluations.

    A step is a Composer batch. If Composer splits it into micro-batches, each has its own range. The arguments are
    those of `Hosted`.
    """

    loop: _TrainerLoop
    loop_type = _TrainerLoop
    fit_end = Hosted.close

    def fit_start(self, state: Any, logger: Any) -> None:
        """Training begins or resumes."""
        self.loop.begin_training(state)

    def batch_start(self, state: Any, logger: Any) -> None:
        """A batch is available."""
        self.loop.step_begin(int(state.timestamp.batch))

    def batch_end(self, state: Any, logger: Any) -> None:
        """The optimizer has stepped."""
        self.loop.step_end()

    def eval_start(self, state: Any, logger: Any) -> None:
        """An evaluation begins."""
        self.loop.evaluation_begins()

    def eval_end(self, state: Any, logger: Any) -> None:
        """An evaluation has ended."""
        self.loop.evaluation_ends()
