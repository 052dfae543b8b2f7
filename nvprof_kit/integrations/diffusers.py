"""Diffusers: the text encoders, denoising steps and VAE of a pipeline.

```python
from nvprof_kit.integrations.diffusers import annotate_pipeline
layers = annotate_pipeline(pipe)
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from nvprof_kit._instrument.loop.inferred import LoopHooks
from nvprof_kit._instrument.loop.schedule import Switch
from nvprof_kit._instrument.modules.calls import watch_calls
from nvprof_kit._instrument.patches import Patch, around, instead
from nvprof_kit.integrations._host import Hosted, HostLoop

DENOISERS = ("transformer", "unet", "prior", "decoder", "controlnet")
"""Prefixes of the components that a denoising step calls."""

_VAE_METHODS = ("encode", "decode")


class _PipelineLoop(HostLoop):
    """The denoising steps of a pipeline's calls.

    Attributes:
        index: Number of completed steps of the current pipeline call.
    """

    index = 0

    def denoiser_called(self) -> None:
        """The denoiser is called, in the current step or a new one."""
        self.step_begin()
        self.phase("denoising step")

    def denoised(self, steps_of_call: int) -> None:
        """The scheduler has stepped.

        Args:
            steps_of_call: Number of steps of the pipeline call; 0 if unknown.
        """
        self.step_end()
        self.index += 1
        if self.index < steps_of_call:
            self.denoiser_called()
        else:
            self.index = 0


class annotate_pipeline(Hosted):
    """Range the models of a pipeline, each under its component's name, its denoising steps and its phases.

    Layers are named ``text_encoder.…``, ``transformer.…`` and ``vae.…``. A step is a denoising step, from the first
    call of the denoiser to the end of ``scheduler.step``; the two calls of classifier-free guidance are in one step.
    The phases are ``denoising step``, the encoders by component name, ``vae encode`` and ``vae decode``. Use it as a
    context manager, or call `close` at the end.

    Args:
        pipe: A ``DiffusionPipeline``; components replaced later are not ranged.
        schedule: Which denoising steps to record, in any form of `nvprof_kit.Schedule.of`.
        path: Trace file of the embedded recorder; ``run.json.gz`` by default.

    Raises:
        UsageError: The schedule is invalid.
    """

    def __init__(self, pipe: Any, schedule: Switch = None, path: str | Path | None = None) -> None:
        super().__init__()
        self.loop: _PipelineLoop = _PipelineLoop(schedule, path=path, annotation={})
        try:
            models = {
                name: component for name, component in pipe.components.items() if isinstance(component, nn.Module)
            }
            self.loop.begin(models, watch=False)
            self.patches.append(LoopHooks(self.loop, functools.partial(_hook, pipe, models)))
            vars(pipe)["_nvprof_kit_layers"] = self  # keeps it alive as long as the pipeline
        except Exception as error:  # the pipeline must work without ranges
            self.loop.give_up(error)

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        """Copies of the pipeline are not annotated."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _hook(pipe: Any, models: dict[str, nn.Module], loop: _PipelineLoop) -> list[Any]:
    """Hooks on the models and the scheduler of a pipeline."""
    hooks: list[Any] = []
    for name, model in models.items():
        if name.startswith(DENOISERS):
            hooks += watch_calls(model, lambda *_call: loop.denoiser_called())
        elif name.startswith("vae") or hasattr(model, "decode"):
            methods = [method for method in _VAE_METHODS if hasattr(model, method)]
            for method in methods:
                begin_phase = functools.partial(loop.phase, f"{name} {method}")
                hooks.append(Patch(model, method, around(begin_phase, functools.partial(loop.phase, None))))
        else:
            hooks += watch_calls(model, lambda *_call, name=name: loop.phase(name), lambda: loop.phase(None))
    if hasattr(pipe, "scheduler") and hasattr(pipe.scheduler, "step"):
        hooks.append(Patch(pipe.scheduler, "step", instead(functools.partial(_step, loop, pipe))))
    return hooks


def _step(loop: _PipelineLoop, pipe: Any, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    result = step(*args, **kwargs)
    steps = getattr(pipe, "_num_timesteps", 0)
    loop.denoised(steps if isinstance(steps, int) else 0)
    return result
