"""Importing the package changes nothing in PyTorch; annotation changes what it must, and takes it back."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpoints
from support.cli import execute
from support.torch_release import needs_torch
from torch import nn

from nvprof_kit import annotate_model
from nvprof_kit._instrument.patches import AfterImport, Patch, around, before, nothing
from nvprof_kit.errors import UsageError

ROOT = Path(__file__).parents[3]

CHECKPOINTS = ("torch.utils.checkpoint.CheckpointFunction", "forward")


def changed_by(program: str) -> str:
    """What a program of its own process changes in PyTorch between its lines ``before = seen()`` and its last."""
    whole = f"from support.ranges.torch_seen import *\n{program}\nprint(changed(before))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return execute(sys.executable, "-c", whole, check=True, PYTHONPATH=path).stdout.strip()


@pytest.mark.slow
def test_importing_every_module_changes_nothing_in_pytorch():
    program = """
import importlib, pkgutil
try:
    import lightning  # which changes torch.compile
except ImportError:
    pass
import nvprof_kit
before = seen()
imported = []
for module in pkgutil.walk_packages(nvprof_kit.__path__, "nvprof_kit."):
    if "__main__" in module.name or ".site" in module.name:
        continue
    try:
        imported.append(importlib.import_module(module.name))
    except ImportError as error:  # a host that is not installed
        assert "nvprof_kit" not in str(error), error
assert len(imported) > 150, len(imported)
"""
    assert changed_by(program) == "[]"


@pytest.mark.slow
@needs_torch(2, 7, "no compiled_parts; the compiler skips this package from the first annotation on")
def test_what_annotation_changes_is_taken_back():
    """With the last annotation, with the model, and while nobody listens; of decorations, while nobody listens."""
    program = f"""
from torch import nn
from nvprof_kit import annotate_model, annotate_optimizer, layer_range
import nvprof_kit._instrument.session as session
from nvprof_kit._instrument.session import Kineto

first, second = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
optimizer = torch.optim.SGD(first.parameters(), 0.1)  # which changes its class
torch.utils.checkpoint.checkpoint(first, torch.ones(1, 2), use_reentrant=False).sum().backward()
before, checkpoints = seen(), {CHECKPOINTS}
handles = [annotate_model(first, compiled_parts=True), annotate_model(second), annotate_optimizer(optimizer)]
assert checkpoints not in changed(before)
session.activate(Kineto())
every = changed(before)
for place in (("compiler", "callbacks"), ("compiler", "cache tag"), checkpoints):
    assert place in every, every
handles[0].remove()
handles[2].remove()
assert checkpoints in changed(before)
handles[1].remove()
assert changed(before) == [], changed(before)

handle = annotate_model(second)
session.deactivate()
assert changed(before) == [], changed(before)
session.activate(Kineto())
assert checkpoints in changed(before)
del second  # and its handle is kept
assert changed(before) == [], changed(before)
session.deactivate()

@layer_range("block")
def block(x):
    return torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False)

block(torch.ones(1, 2)).sum().backward()
assert changed(before) == [], changed(before)
session.activate(Kineto())
block(torch.ones(1, 2)).sum().backward()
assert checkpoints in changed(before)
session.deactivate()
"""
    assert changed_by(program) == "[]"


def patched() -> list[bool]:
    """Whether each change of checkpoints is in place."""
    frame: Any = checkpoints._CheckpointFrame
    functions = [frame.__init__, checkpoints.CheckpointFunction.forward]
    return [function.__code__.co_filename != checkpoints.__file__ for function in functions]


def test_an_annotation_that_fails_leaves_nothing(sink):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    before = patched()
    with pytest.raises(UsageError, match="not an optimizer"):
        annotate_model(model, depth="leaf", optimizer=model)
    assert patched() == before
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    with annotate_model(model, depth="leaf"):
        model(torch.ones(1, 2))
    assert sink.lines == ["Sequential", "  0", "  1"]
    with pytest.raises(UsageError), annotate_model(model), annotate_model(model):
        pass
    assert patched() == before


def test_a_question_whether_it_is_there_is_no_import(tmp_path, monkeypatch):
    """As `datasets` and `transformers` ask for torch before anything imports it."""
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    called: list[str] = []
    waiting = [AfterImport("waited_for", lambda module: called.append(module.__name__)) for _ in range(2)]
    monkeypatch.setattr(sys, "meta_path", [*waiting, *sys.meta_path])
    assert importlib.util.find_spec("waited_for") is not None and called == []
    assert importlib.import_module("waited_for").value == 1
    importlib.reload(sys.modules["waited_for"])
    assert called == ["waited_for"] * 2
    assert not {*waiting} & {*sys.meta_path}
    del sys.modules["waited_for"]


@pytest.mark.parametrize("make", [before(lambda *_call, **_names: None), around(nothing, nothing)])
def test_a_call_may_have_an_argument_of_any_name(make):
    class Kernel:
        def run(self, **arguments):
            return arguments

    patch, named = Patch(Kernel, "run", make), {"original": 1, "function": 2, "first": 3, "args": 4}
    assert Kernel().run(**named) == named
    patch.remove()
