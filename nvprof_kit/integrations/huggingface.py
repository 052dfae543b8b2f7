"""Hugging Face `Trainer` and trainers derived from it, such as TRL's: a `TrainerCallback`.

```python
from nvprof_kit.integrations.huggingface import LayerCallback
trainer = Trainer(..., callbacks=[LayerCallback()])
```
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from nvprof_kit._instrument.patches import never_fails
from nvprof_kit.integrations._host import Hosted


class LayerCallback(Hosted, TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Range the layers of the trained model, and steps, phases, micro-batches and evaluations.

    A step is an optimizer step, numbered like the trainer's ``global_step``, from the fetch of its first batch to
    `on_step_end`. With gradient accumulation, each micro-batch has its own range. Evaluations are the phase ``eval``,
    between steps. The arguments are those of `Hosted`.
    """

    on_step_end = Hosted.step_ends
    on_evaluate = on_predict = Hosted.evaluation_ends
    on_train_end = Hosted.close

    @never_fails
    def on_train_begin(self, args: Any, state: Any, _control: Any, **about: Any) -> None:
        """Training begins or resumes."""
        self.loop.accumulation = args.gradient_accumulation_steps
        self.loop.train_dataset = getattr(about.get("train_dataloader"), "dataset", None)
        self.loop.begin(about["model"], first=state.global_step)

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_about: Any) -> None:
        """The batches of a step have been fetched."""
        self.loop.step_begin(state.global_step)
