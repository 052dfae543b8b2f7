"""Megatron: a callback for Megatron-Bridge, and one call for Megatron-LM's own training loop, which has no callbacks.

```python
from nvprof_kit.integrations.megatron import LayerCallback
pretrain(config, forward_step, callbacks=[LayerCallback()])          # Megatron-Bridge

from nvprof_kit.integrations.megatron import annotate_training
annotate_training()                                                  # Megatron-LM, above pretrain(...)
```
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nvprof_kit._instrument.loop.schedule import Switch
from nvprof_kit._instrument.patches import Patch, after_import, around, instead, never_fails
from nvprof_kit.integrations._host import Hosted

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
TRAINING = "megatron.training.training"


class _Training(Hosted):
    _backward: Patch | None = None

    @never_fails
    def begin(self, chunks: Any, first: int) -> None:
        """Begin training with the model chunks of this rank."""
        models = []
        for chunk in chunks if isinstance(chunks, (list, tuple)) else [chunks]:
            while hasattr(chunk, "module"):  # wrappers (DistributedDataParallel, Float16Module), which call it in turn
                chunk = chunk.module  # noqa: PLW2901
            models.append(chunk)
        self.loop.begin(models, first=first)
        if SCHEDULES in sys.modules and self._backward not in self.patches:  # a loop may begin anew
            backward = around(self.loop.backward_begins, self.loop.backward_ends)
            self._backward = Patch(sys.modules[SCHEDULES], "backward_step", backward)
            self.patches.append(self._backward)


class LayerCallback(_Training):
    """Range the layers of Megatron-Bridge's model chunks, and steps, phases and evaluations.

    It implements ``megatron.bridge.training.callbacks.Callback`` without inheriting from it, so it can be constructed
    without Megatron-Bridge installed. The arguments are those of `Hosted`.
    """

    on_train_step_end, on_train_end = Hosted.step_ends, Hosted.close
    on_eval_start = on_test_start = Hosted.evaluation_begins
    on_eval_end = on_test_end = Hosted.evaluation_ends

    @never_fails
    def on_train_start(self, context: Any) -> None:
        """Training begins or resumes."""
        first = getattr(getattr(context.state, "train_state", None), "step", 0)
        self.begin(context.model, int(first))

    def on_train_step_start(self, _context: Any) -> None:
        """A step begins."""
        self.loop.step_begin()


class annotate_training(_Training):
    """Range the layers, steps, phases and evaluations of Megatron-LM's ``pretrain``.

    Wraps its functions ``train_step`` and ``evaluate``, now or when ``megatron.training`` is imported. Megatron-LM's
    own ``--profile`` can be used in addition; it captures steps with cudaProfilerStart, but does not range the backward
    of layers. The arguments are those of `Hosted`.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        super().__init__(schedule, path, **annotation)
        after_import(TRAINING, self.wrap)

    def wrap(self, training: Any) -> None:
        """Wrap the functions of Megatron-LM's module of training."""
        self.patches += [
            Patch(training, "train_step", instead(self._train_step)),
            Patch(training, "evaluate", around(self.loop.evaluation_begins, self.loop.evaluation_ends)),
        ]

    def _train_step(
        self, method: Any, forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        iteration = kwargs.get("iteration")
        if not self.loop.runs:
            self.begin(model, iteration or 0)
        self.loop.step_begin(iteration)
        try:
            return method(forward_step_func, data_iterator, model, *args, **kwargs)
        finally:
            self.loop.step_end()
