"""`memory_snapshot` with the allocator played by a stand-in: when it records, labels, writes and stops."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from played_allocator import Allocator

import nvprof_kit._instrument.session as session
from nvprof_kit import layer_range, memory_snapshot, phase, step
from nvprof_kit._instrument.loop.annotate import annotate_model
from nvprof_kit._instrument.memory import snapshot
from nvprof_kit.errors import UsageError


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory", allocator)
    monkeypatch.setattr(
        torch._C,
        "_cuda_attach_out_of_memory_observer",
        lambda call: setattr(allocator, "observer", call),
        raising=False,
    )
    monkeypatch.setattr(snapshot, "_observed", False)
    return allocator


def test_labels_follow_step_phase_and_layer(allocator, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    annotate_model(model, depth=1, backward=True)
    with memory_snapshot(tmp_path / "run.pickle") as recorded, step(7):
        with phase("forward"):
            loss = model(torch.ones(1, 2)).sum()
        with phase("backward"):
            loss.backward()
    names = [label for label in dict.fromkeys(allocator.labels) if label]
    assert names == [
        ";step=7",
        "nvprof_kit:phase:forward;step=7",
        "nvprof_kit:forward:Sequential;step=7",
        "nvprof_kit:forward:0;step=7",
        "nvprof_kit:forward:1;step=7",
        "nvprof_kit:phase:backward;step=7",
        "nvprof_kit:backward:Sequential backward;step=7",
        "nvprof_kit:backward:1 backward;step=7",
        "nvprof_kit:backward:0 backward;step=7",
    ]
    assert allocator.labels[-1] == ""
    assert allocator.recording == ["all", None]
    assert recorded.written == [tmp_path / "run.pickle"]
    assert session.backend is None


def test_a_thread_s_label_never_outlives_its_step(allocator, tmp_path):
    """PyTorch keeps a label for each thread: autograd's, between layers, must not bear the one of the step before."""
    with memory_snapshot(tmp_path / "run.pickle"), step(7), phase("backward"):
        before = len(allocator.labels)
        with ThreadPoolExecutor(1) as autograd:
            autograd.submit(layer_range("layers.0")(lambda: None)).result()
        assert allocator.labels[before:] == ["nvprof_kit:forward:layers.0;step=7", ""]
    stretches = pickle.loads((tmp_path / "run.pickle").read_bytes())["nvprof_kit_stretches"]
    assert [label for _, label in stretches] == [";step=7", "nvprof_kit:phase:backward;step=7", ";step=7", ""]
    assert [begin for begin, _ in stretches] == sorted(begin for begin, _ in stretches)


def test_written_at_a_step(allocator, tmp_path):
    with memory_snapshot(tmp_path / "run.pickle", at_step=1) as recorded:
        for number in range(4):
            with step(number):
                pass
            assert (len(recorded.written) == 1) == (number >= 1)
    assert allocator.recording == ["all", None]


def test_written_when_memory_runs_out_and_when_the_program_raises(allocator, tmp_path):
    with pytest.raises(MemoryError), memory_snapshot(tmp_path / "run.pickle") as recorded:
        allocator.observer(0, 1, 2, 3)
        raise MemoryError
    assert [path.name for path in recorded.written] == ["run_oom.pickle", "run.pickle"]
    snapshot = pickle.loads((tmp_path / "run_oom.pickle").read_bytes())
    assert snapshot == {"segments": [], "device_traces": [[], []], "nvprof_kit_stretches": []}
    allocator.observer(0, 1, 2, 3)  # nothing is recorded now: nothing happens
    assert len(recorded.written) == 2


def test_a_path_that_cannot_be_written_is_refused_before_the_program_runs(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        memory_snapshot(tmp_path / "none" / "run.pickle").__enter__()


@pytest.mark.parametrize(
    ("has_cuda", "backend", "reason"),
    [(False, "native", "no CUDA here"), (True, "cudaMallocAsync", "not cudaMallocAsync")],
)
def test_where_there_is_no_history_it_warns_and_does_nothing(
    has_cuda, backend, reason, allocator, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    with pytest.warns(UserWarning, match=reason), memory_snapshot(tmp_path / "run.pickle"):
        assert session.backend is None
    assert allocator.recording == []
    assert list(tmp_path.iterdir()) == []


def test_without_an_allocator_ranges_have_no_marks(sink):
    session.activate(session._with_memory(sink, session.read_cuda))
    with layer_range("layers.0"):
        pass
    assert sink.lines == ["layers.0"]


@pytest.mark.parametrize(("value", "kind"), [("1", session.Watch), ("0", session.Nvtx), ("", session.Nvtx)])
def test_the_environment_asks_for_it(value, kind, monkeypatch):
    monkeypatch.setattr(session, "mode", "on")
    monkeypatch.setenv("NVPROF_KIT_MEMORY", value)
    assert type(session._tool_backend()) is kind
    monkeypatch.setattr(session, "mode", "off")
    assert session._tool_backend() is None


def test_one_at_a_time(allocator, tmp_path):
    with memory_snapshot(tmp_path / "a.pickle"), pytest.raises(UsageError, match="end that snapshot first"):
        memory_snapshot(tmp_path / "b.pickle").__enter__()
