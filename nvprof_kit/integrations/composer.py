"""MosaicML Composer: a callback.

```python
from nvprof_kit.integrations.composer import LayerCallback
trainer = composer.Trainer(..., callbacks=[LayerCallback()])
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer import Callback

from nvprof_kit._instrument.loop.schedule import Switch
from nvprof_kit._instrument.modules.blocks import Submodule, children
from nvprof_kit._instrument.patches import never_fails
from nvprof_kit.integrations._host import HostLoop


class LayerCallback(Callback):  # type: ignore[misc]  # composer may be missing
    """Range the layers of the trained model, and steps, phases, micro-batches and evaluations.

    A step is a Composer batch. If Composer splits it into micro-batches, each has its own range.

    Args:
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`.
        path: Trace file of the embedded recorder; ``run.json.gz`` by default.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is invalid.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = _TrainerLoop(schedule, path=path, annotation=annotation)

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

    def fit_end(self, state: Any, logger: Any) -> None:
        """Training has ended."""
        self.loop.end()

    def close(self, state: Any, logger: Any) -> None:
        """The trainer closes, possibly after an exception."""
        self.loop.end()


class _TrainerLoop(HostLoop):
    @never_fails
    def begin_training(self, state: Any) -> None:
        """Begin training; Composer calls ``ComposerModel.forward`` directly, so its parts are watched too."""
        parts = [child.module for child in children(Submodule("", state.model))]
        size, micro = state.device_train_microbatch_size, getattr(state.train_dataloader, "batch_size", None)
        self.accumulation = -(-micro // size) if isinstance(size, int) and isinstance(micro, int) else 1
        self.train_dataset = getattr(state.train_dataloader, "dataset", None)
        self.begin(state.model, first=int(state.timestamp.batch), entered=parts)
