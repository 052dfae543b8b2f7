"""MosaicML Composer: a callback.

```python
from nvprof_kit.integrations.composer import LayerCallback
trainer = composer.Trainer(..., callbacks=[LayerCallback()])
```
"""

from __future__ import annotations

from typing import Any

from composer import Callback

from nvprof_kit._instrument.patches import never_fails
from nvprof_kit.integrations._host import Hosted


class LayerCallback(Hosted, Callback):  # type: ignore[misc]  # composer may be missing
    """Range the layers of the trained model, and steps, phases, micro-batches and evaluations.

    A step is a Composer batch. If Composer splits it into micro-batches, each has its own range. The arguments are
    those of `Hosted`.
    """

    batch_end, fit_end = Hosted.step_ends, Hosted.close
    eval_start, eval_end = Hosted.evaluation_begins, Hosted.evaluation_ends

    @never_fails
    def fit_start(self, state: Any, logger: Any) -> None:
        """Training begins or resumes; Composer calls ``ComposerModel.forward`` directly, so parts are watched too."""
        size, micro = state.device_train_microbatch_size, getattr(state.train_dataloader, "batch_size", None)
        self.loop.accumulation = -(-micro // size) if isinstance(size, int) and isinstance(micro, int) else 1
        self.loop.train_dataset = getattr(state.train_dataloader, "dataset", None)
        self.loop.begin(state.model, first=int(state.timestamp.batch), with_parts=True)

    def batch_start(self, state: Any, logger: Any) -> None:
        """A batch is available."""
        self.loop.step_begin(int(state.timestamp.batch))
