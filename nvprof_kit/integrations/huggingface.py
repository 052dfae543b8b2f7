"""Hugging Face `Trainer`, and what is built on it, as TRL's trainers: a `TrainerCallback`.

```python
from nvprof_kit.integrations.huggingface import LayerCallback
trainer = Trainer(..., callbacks=[LayerCallback()])
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from nvprof_kit._instrument.loop.switch import Switch
from nvprof_kit.integrations._host.guard import never_fails
from nvprof_kit.integrations._host.loop import HostLoop


class LayerCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Ranges the layers of the trained model, and its steps, phases, micro-batches and evaluations.

    A step is an optimizer's step, numbered as the trainer's ``global_step``, and lasts from the fetch of its first
    batch to `on_step_end`. Under gradient accumulation each micro-batch has a range of its own in it; evaluations are
    the phase ``eval``, between steps.

    Args:
        schedule: Which steps to record, as `loop.HostLoop` takes it.
        path: Trace of the embedded recorder, ``run.json.gz`` by default.
        annotation: Options of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is none.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = _TrainerLoop(schedule, path=path, annotation=annotation)

    def on_train_begin(self, args: Any, state: Any, _control: Any, **about: Any) -> None:
        """The training begins, or goes on from a checkpoint."""
        self.loop.begin_training(args, state, **about)

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_about: Any) -> None:
        """A step's batches are fetched."""
        self.loop.step_begin(state.global_step)

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_about: Any) -> None:
        """The optimizer has stepped."""
        self.loop.step_end()

    def on_evaluate(self, _args: Any, _state: Any, _control: Any, **_about: Any) -> None:
        """An evaluation is over."""
        self.loop.evaluation_ends()

    on_predict = on_evaluate

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_about: Any) -> None:
        """The training is over."""
        self.loop.end()


class _TrainerLoop(HostLoop):
    @never_fails
    def begin_training(self, args: Any, state: Any, **about: Any) -> None:
        """The training begins with the trainer's arguments, state and parts."""
        self.accumulation = args.gradient_accumulation_steps
        self.train_dataset = getattr(about.get("train_dataloader"), "dataset", None)
        self.begin(about["model"], first=state.global_step)
