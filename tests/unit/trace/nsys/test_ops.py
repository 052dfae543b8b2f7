"""Calls and operations that an nsys export and a PyTorch trace of it have in common."""

from support.captures import as_kineto

from nvprof_kit._trace.open import open_capture


def test_calls_and_the_hosts_end_of_copies_are_those_of_a_pytorch_trace(file, tmp_path):
    file.kernel(300, 330, launched=(110, 115))
    file.call("cudaStreamSynchronize_v3020", 120, 340)
    for start, kind, memory in ((350, 1, (0, 2)), (360, 2, (2, 1)), (370, 8, (2, 2))):
        file.kernel(
            start, start + 9, launched=(start - 220, start - 218), table="MEMCPY", copy_kind=kind, memory=memory
        )
    file.write()
    as_kineto.write(file.path, tmp_path / "run.json.gz")
    file.overhead("CUPTI: Buffer flush", 150, 160)
    read = [open_capture(path, optional=("calls", "host_memory")) for path in (file.write(), tmp_path / "run.json.gz")]
    for trace in read:
        calls = trace.calls
        assert calls is not None
        api, overhead = calls[calls["kind"] == 0].sort_values("start_ns"), calls[calls["kind"] == 1]
        assert api["name"].tolist() == ["cudaLaunchKernel", "cudaStreamSynchronize", *["cudaLaunchKernel"] * 3]
        assert (api["end_ns"] - api["start_ns"]).tolist() == [5, 220, 2, 2, 2]
        assert calls["tid"].nunique() == calls["pid"].nunique() == 1
        assert trace.ops.sort_values("start_ns")["host_memory"].tolist() == ["", "pageable", "pinned", ""]
        expected = [[150, 160, -1]] if trace is read[0] else []
        assert overhead[["start_ns", "end_ns", "correlation"]].to_numpy().tolist() == expected
