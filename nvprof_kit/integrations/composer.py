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

from nvprof_kit._instrument.loop.switch import Switch
from nvprof_kit._instrument.modules.blocks import Part, children
from nvprof_kit.integrations._host.guard import never_fails
from nvprof_kit.integrations._host.loop import HostLoop


class LayerCallback(Callback):  # type: ignore[misc]  # composer may be missing
    """Ranges the layers of the trained model, and its steps, phases, micro-batches and evaluations.

    A step is a batch of Composer's, which it may split into micro-batches; each has a range of its own in it.

    Args:
        schedule: Which steps to record, as `loop.HostLoop` takes it.
        path: Trace of the embedded recorder, ``run.json.gz`` by default.
        annotation: Options of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is none.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = _TrainerLoop(schedule, path=path, annotation=annotation)

    def fit_start(self, state: Any, logger: Any) -> None:
        """The training begins, or goes on."""
        self.loop.begin_training(state)

    def batch_start(self, state: Any, logger: Any) -> None:
        """A batch is there."""
        self.loop.step_begin(int(state.timestamp.batch))

    def batch_end(self, state: Any, logger: Any) -> None:
        """The optimizer has stepped."""
        self.loop.step_end()

    def eval_start(self, state: Any, logger: Any) -> None:
        """An evaluation begins."""
        self.loop.evaluation_begins()

    def eval_end(self, state: Any, logger: Any) -> None:
        """It is over."""
        self.loop.evaluation_ends()

    def fit_end(self, state: Any, logger: Any) -> None:
        """The training is over."""
        self.loop.end()

    def close(self, state: Any, logger: Any) -> None:
        """The trainer is over, perhaps by an exception."""
        self.loop.end()


class _TrainerLoop(HostLoop):
    @never_fails
    def begin_training(self, state: Any) -> None:
        """The training begins; a ``ComposerModel`` is called by its ``forward``, so its parts are watched too."""
        parts = [part.module for part in children(Part("", state.model))]
        size, micro = state.device_train_microbatch_size, getattr(state.train_dataloader, "batch_size", None)
        self.accumulation = -(-micro // size) if isinstance(size, int) and isinstance(micro, int) else 1
        self.train_dataset = getattr(state.train_dataloader, "dataset", None)
        self.begin(state.model, first=int(state.timestamp.batch), entered=parts)
