"""Lightning's Fabric: a callback. It needs ``lightning`` or ``lightning_fabric`` alone.

```python
from nvprof_kit.integrations.fabric import FabricCallback
fabric = Fabric(..., callbacks=[FabricCallback()])
```

If a tool is attached or a schedule is set, the entry point ``lightning.fabric.callbacks_factory`` adds it by itself.
"""

from __future__ import annotations

from typing import Any

from nvprof_kit.integrations._host import Hosted


class FabricCallback(Hosted):
    """Range a loop with `Fabric`: ``Fabric(callbacks=[FabricCallback()])``.

    The loop begins with ``fabric.setup(model, …)``. Fabric has no notion of steps, so a step ends when an optimizer has
    stepped and the next batch is fetched or the model is called. The arguments are those of `Hosted`.
    """

    own_steps = True

    def on_after_setup(self, fabric: Any = None, module: Any = None) -> None:
        """A model is set up; further ones have their class before the names of their layers."""
        model = getattr(module, "_original_module", module)
        if not self.loop.runs:
            self.loop.begin(model)
        else:
            self.loop.annotate_too(model)
