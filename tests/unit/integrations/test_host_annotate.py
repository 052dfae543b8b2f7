"""``NVPROF_KIT_ANNOTATE=1``: a program without a line of ours, in the process and its workers."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from support.cli import execute
from support.data import ROOT
from support.torch_release import STACKS
from support.unannotated import PROGRAM

import nvprof_kit
from nvprof_kit.integrations.annotate import SITE, environment

pytestmark = pytest.mark.slow


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return execute(sys.executable, *command, cwd=ROOT, **(known | environment(known)))


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("nvprof-kit annotate:")]


@pytest.mark.parametrize("schedule", ["", "0:1", "3:5"])
def test_record_counts_a_step_before_inside_or_after_the_recorded_ones(tmp_path, schedule):
    trace, program = tmp_path / "run.json.gz", PROGRAM.replace("counting(8, 17)", "counting(24, 17)")
    options = ["--count", "--annotate", *(["--schedule", schedule] if schedule else [])]
    done = run("-m", "nvprof_kit", "record", *options, "-o", str(trace), "--", sys.executable, "-c", program)
    assert done.returncode == 0 and "nothing was counted" not in done.stderr, done.stderr
    said = json.loads((tmp_path / "run.flops.json").read_text())
    assert said["steps"] == 1 and said["unknown"] == []
    places = [(row["layer"], row["phase"]) for row in said["ranges"]]
    assert {("layers.0", "forward"), ("layers.0", "backward"), ("(none)", "optimizer")} <= {*places}
    products = sum(row["flops"] for row in said["operators"] if places[row["range"]][1] == "forward")
    width, tokens = 64, 4 * 16  # of each of 2 layers 4 + 3 * 4 weights of 64 x 64 and two products of 16 x 16; a head
    assert products == 2 * tokens * (2 * 16 * width * width + 2 * 2 * 16 * width + 512 * width)
    rows = nvprof_kit.open(trace).flops(peak={"fp32": 1e12}).rows.set_index(["layer", "phase"])
    assert rows.loc[("layers.1.mlp", "backward"), "flops"] > 0


def test_record_says_that_nothing_was_counted_and_replaces_counts_only_by_force(tmp_path):
    record = ["-m", "nvprof_kit", "record", "--count", "-o", str(tmp_path / "run.json"), "--", sys.executable, "-c"]
    done = run(*record, "import torch; torch.ones(2, 2) @ torch.ones(2, 2)")
    assert done.returncode == 0 and "nothing was counted: the program ran no second step" in done.stderr
    (tmp_path / "run.json").rename(tmp_path / "old.json")
    (tmp_path / "run.flops.json").write_text("{}")
    done = run(*record, "import torch")
    assert done.returncode == 2 and f"{tmp_path / 'run.flops.json'} exists" in done.stderr
    assert (tmp_path / "run.flops.json").read_text() == "{}"


def test_a_training_is_ranged_without_a_line(tmp_path):
    trace = tmp_path / "run.json.gz"
    record = ["-m", "nvprof_kit", "record", "-o", str(trace), "--"]
    done = run(*record, sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert told(done) == ["nvprof-kit annotate: annotated TinyTransformer: 14 modules, 2 blocks among them"]
    with gzip.open(trace, "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    steps = {name for name in names if name.startswith("nvprof_kit:step:")}
    assert steps == {"nvprof_kit:step:step 0", "nvprof_kit:step:step 1"}
    phases = ("phase:data", "phase:forward", "phase:optimizer")
    layers = ("forward:layers.1.mlp", "backward:layers.1.mlp backward")
    assert {f"nvprof_kit:{name}" for name in (*phases, *layers)} <= names


@pytest.mark.parametrize("program", ["step phase", "annotate step phase", "step", "annotate", "generation"])
def test_a_program_keeps_its_own_steps_and_phases(tmp_path, program):
    trace = tmp_path / "run.json"
    source = """
import nvprof_kit, sys, torch
from contextlib import nullcontext as none
own = sys.argv[1].split()
step = nvprof_kit.step if "step" in own else lambda number: none()
phase = nvprof_kit.phase if "phase" in own else lambda name: none()
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "annotate" in own:
    nvprof_kit.annotate_model(model)
if "generation" in own:
    nvprof_kit.generation(model, phase_of=lambda *_: "call").__enter__()
for number, tokens in enumerate(torch.utils.data.DataLoader(torch.randn(4, 512))):
    with step(number):
        with phase("forward"):
            loss = model(tokens).sum()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
"""
    done = run("-m", "nvprof_kit", "record", "-o", str(trace), "--", sys.executable, "-c", source, program)
    assert done.returncode == 0, done.stderr
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    phases = [f"phase:{name}" for name in ("forward", "backward", "optimizer") if "phase" in program for _ in range(4)]
    phases += ["phase:call"] * 4 * ("generation" in program)
    ranges = sorted(f"nvprof_kit:{name}" for name in [*phases, *(f"step:step {number}" for number in range(4))])
    assert sorted(name for name in names if name.startswith(("nvprof_kit:step:", "nvprof_kit:phase:"))) == ranges


def test_a_program_without_a_model_is_told_so_once():
    child = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    done = run("-c", child)
    assert done.returncode == 0, done.stderr
    nothing = "no module of 100000 parameters or with repeated blocks was called in this process; nothing is"
    assert told(done) == [f"nvprof-kit annotate: {nothing} annotated in it"]


def test_a_program_without_torch_starts_as_without_us(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('their own')")
    done = run("-c", "import sys; print(sys.argv, 'torch' in sys.modules)", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "their own\n['-c'] False\n", "")


def test_a_python_without_the_package_says_so(tmp_path):
    command = [sys.executable, "-S", "-c", "import sitecustomize; print('ran')"]
    done = execute(*command, cwd=tmp_path, NVPROF_KIT_ANNOTATE="1", PYTHONPATH=str(SITE))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "has no nvprof_kit" in done.stderr


def test_the_environment_keeps_what_is_there():
    first = environment({"PYTHONPATH": "/a:/b"})
    assert first == {"NVPROF_KIT_ANNOTATE": "1", "PYTHONPATH": f"{SITE}:/a:/b"}
    assert environment(first) == first
    assert environment({})["PYTHONPATH"] == str(SITE)


@STACKS
def test_rows_of_stacks_have_the_names_of_the_model(tmp_path):
    """PyTorch names a module by class and number; a model that the program does not annotate is annotated.

    PyTorch's tracer of Python takes the callable of every module by the code of ``nn.Module.__call__``.
    """
    program = "from torch import nn, ones; nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))(ones(1, 512))"
    found = {}
    for option in ("--annotate", "--no-annotate"):
        trace = tmp_path / f"run{option}.json"
        chosen = [] if option == "--annotate" else [option]
        record = ["-m", "nvprof_kit", "record", "--detail", "stacks", *chosen, "-o", str(trace), "--", sys.executable]
        execute(sys.executable, *record, "-c", program, check=True)
        assert "nn.Module: Linear_1" in trace.read_text()
        found[option] = set(nvprof_kit.open(trace).layers().to_frame()["layer"])
    assert {"Sequential", "0", "1"} <= found["--annotate"]  # the first call has its ranges, too
    assert not {"0", "1"} & found["--no-annotate"]
    # models that are compiled before their first call, small and large, or traced: a graph for each shape, also anew
    module = "class Own(torch.nn.Linear):\n def forward(self, x): return torch.nn.Linear.forward(self, x)"
    models = "(Own(8, 8), 8), (torch.nn.Sequential(Own(512, 512), Own(512, 512)), 512)"
    compiled = f"for m, n in {models}:\n c = torch.compile(m, backend='eager')\n for k in 2, 2, 3: c(torch.ones(k, n))"
    compiled += "\ntorch.compiler.reset(); c(x := torch.ones(2, 512)); torch.jit.trace(Own(512, 512), x)(x)"
    compiled += "\nassert torch._dynamo.utils.counters['stats']['unique_graphs'] == 5"
    record[record.index("--no-annotate")] = "--force"
    execute(sys.executable, *record, "-c", f"import torch\n{module}\n{compiled}", check=True)
    # modules that only a compiled function calls: from the second step
    compiled = "f = torch.compile(lambda x: m(x).sum(), backend='eager', fullgraph=True)"
    steps = "for _ in range(3):\n f(torch.ones(2, 8)).backward()\n o.step()"
    model = "m = torch.nn.Linear(8, 8); o = torch.optim.SGD(m.parameters())"
    trace.unlink()
    execute(sys.executable, *record, "-c", f"import torch\n{model}\n{compiled}\n{steps}", check=True)
    assert trace.exists()
