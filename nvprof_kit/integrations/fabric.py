"""Lightning's Fabric: a callback. It needs ``lightning`` or ``lightning_fabric`` alone.

```python
from nvprof_kit.integrations.fabric import FabricCallback
fabric = Fabric(..., callbacks=[FabricCallback()])
```

If a tool is attached or a schedule is set, the entry point ``lightning.fabric.callbacks_factory`` adds it by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvprof_kit._instrument.loop.schedule import Switch
from nvprof_kit.integrations._host import HostLoop


class FabricCallback:
    """Range a loop with `Fabric`: ``Fabric(callbacks=[FabricCallback()])``.

    The loop begins with ``fabric.setup(model, …)``. Fabric has no notion of steps, so a step ends when an optimizer has
    stepped and the next batch is fetched or the model is called.

    Args:
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`.
        path: Trace file of the embedded recorder; ``run.json.gz`` by default.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is invalid.
    """

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = HostLoop(schedule, path=path, annotation=annotation, own_steps=True)

    def on_after_setup(self, fabric: Any = None, module: Any = None) -> None:
        """A model is set up; further ones have their class before the names of their layers."""
        model = getattr(module, "_original_module", module)
        if not self.loop.runs:
            self.loop.begin(model)
        else:
            self.loop.annotate_too(model)

    def close(self) -> None:
        """End the loop and write what was recorded; also called at exit."""
        self.loop.end()
