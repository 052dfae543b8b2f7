"""What `LayerProfiler` recorded as text and curves: the data halves."""

import io
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.layers.profile import LayerProfile, layer_profile
from nvprof_kit._profiler.cost import OwnCost
from nvprof_kit._report.text.layer_profile import profile_head, profile_report, time_figure
from nvprof_kit._report.text.table import print_to
from nvprof_kit._trace.open import open_capture

FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)64>>(Flash_fwd_params)"


def profile(path: Path, kinds: dict[str, str]) -> LayerProfile:
    """Two steps of two blocks; the second takes 2 ms, in step 2 it takes 4, half of it flash attention."""
    file = NsysFile(path / "run.sqlite")
    for step, base in ((1, 0), (2, 100_000_000)):
        file.range_(f"step {step}", base, base + 90_000_000, category="step", payload=step)
        file.range_("blocks.0", base + 100, base + 200, category="forward")
        file.range_("blocks.1", base + 300, base + 400, category="forward")
        file.kernel(base + 1_000_000, base + 2_000_000, launched=(base + 110, base + 120))
        file.kernel(base + 3_000_000, base + 3_000_000 + step * 1_000_000, launched=(base + 310, base + 320))
        file.kernel(
            base + 6_000_000, base + 6_000_000 + step * 1_000_000, launched=(base + 330, base + 340), name=FLASH
        )
    return layer_profile(open_capture(file.write(), optional=("name",)), kinds)


def printed(parts: list[object]) -> str:
    file = io.StringIO()
    print_to(file, parts)
    return file.getvalue()


def test_a_curve_for_each_kind_and_its_attention(tmp_path):
    (axes,) = time_figure(profile(tmp_path, {"blocks.0": "spatial", "blocks.1": "temporal"})).axes
    assert axes.get_legend_handles_labels()[1] == ["spatial", "temporal", "temporal: attention"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["blocks.0", "blocks.1"]


def test_the_table_of_kinds(tmp_path):
    head = printed(profile_head(profile(tmp_path, {"blocks.0": "Block", "blocks.1": "Block"}), ["a fact"]))
    lines = head.splitlines()
    assert lines[0] == "a fact"
    assert lines[1] == "GPU busy: 4.4 % of the recorded steps"  # 3 and 5 ms of twice 90
    block, flash = (line.split() for line in lines[5:7])
    # per step: 2 calls, 4 ms, 1.5 ms of it attention; a block in a step takes 1 to 4 ms
    assert block == ["Block", "2", "2", "4.000", "4.000", "1.500", "2.000", "1.000", "4.000", "200", "ns"]
    assert flash == ["flash", "attention", "1", "1", "1.500", "1.500", "1.500", "1.000", "2.000"]


def test_no_kinds_is_said(file):
    file.range_("head", 100, 200, category="forward")
    file.kernel(300, 400, launched=(110, 120))
    found = layer_profile(open_capture(file.write(), optional=("name",)), {})
    text = printed(profile_report(found, []))
    assert "No block ran and no fused attention" in text and "head" in text


PLAIN, WRITTEN = (10**7, 8 * 10**6, 11 * 10**6), (10**9, 2 * 10**9, 5 * 10**8)
SECONDS = "set-up 1.00 s, writing 2.00 s, reading and drawing 0.50 s"


@pytest.mark.parametrize(
    ("recorded", "plain", "text"),
    [
        ((12, 11, 30), PLAIN,
         "a recorded step took 12.00 ms (median of 3), a plain one 10.00 ms (median of 3): 1.200 times; "),
        ((12,), (), "a recorded step took 12.00 ms (median of 1), and no plain step ran to compare it with; "),
        ((), PLAIN, ""),
    ],
)  # fmt: skip
def test_the_own_cost(recorded, plain, text):
    assert str(OwnCost(tuple(10**6 * ms for ms in recorded), plain, *WRITTEN)) == f"Own cost: {text}{SECONDS}"
