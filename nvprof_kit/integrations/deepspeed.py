"""DeepSpeed: range the engine's ``forward``, ``backward`` and ``step``.

```python
from nvprof_kit.integrations.deepspeed import annotate_engine
engine, optimizer, loader, _ = deepspeed.initialize(...)
layers = annotate_engine(engine)
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvprof_kit._instrument.loop.schedule import Switch
from nvprof_kit._instrument.patches import Patch, around, instead
from nvprof_kit.integrations._host import Hosted, HostLoop


class annotate_engine(Hosted):
    """Range the layers of an engine's model, and steps, phases and micro-batches.

    A step is an optimizer step; it ends with the ``engine.step()`` at the gradient accumulation boundary and contains
    one range per micro-batch. Use it as a context manager, or call `close` at the end.

    Args:
        engine: The engine returned by ``deepspeed.initialize``.
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`.
        path: Trace file of the embedded recorder; ``run.json.gz`` by default.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is invalid.
    """

    def __init__(self, engine: Any, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        super().__init__(schedule, path, **annotation)
        try:
            self.loop.accumulation = engine.gradient_accumulation_steps()
            self.loop.begin(engine.module, first=engine.global_steps)
            self.patches.append(Patch(engine, "backward", around(self.loop.backward_begins, self.loop.backward_ends)))
            self.patches.append(Patch(engine, "step", instead(functools.partial(_step, self.loop, engine))))
        except Exception as error:  # the engine must work without ranges
            self.give_up(error)


def _step(loop: HostLoop, engine: Any, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not engine.is_gradient_accumulation_boundary():
        return step(*args, **kwargs)
    loop.optimizer_begins(engine.optimizer)
    try:
        return step(*args, **kwargs)
    finally:
        loop.optimizer_ends()
        loop.step_end()
