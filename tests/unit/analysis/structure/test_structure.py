"""Layers from the order of kernels alone, compared with what the same captures' own ranges name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.structure_truth import DATA, KEPT_APART, LOOKED_AT, WITHOUT_BLOCKS, compare, without_ranges

import nvprof_kit

_GEMM, _NORM, _ADD = (
    "nvjet_sm90_tst",
    "void rms_norm_kernel<float>(T1)",
    "void elementwise_kernel<CUDAFunctor_add<float>>(T1)",
)
_FORWARD, _BACKWARD = "void flash_fwd_kernel<T>(T1)", "void flash_bwd_kernel<T>(T1)"
_BLOCK = (_NORM, _GEMM, _FORWARD, _GEMM, _ADD, _NORM, _GEMM, "silu_kernel", _GEMM, _ADD)
_EDGES = ("vectorized_gather_kernel", "argmax_kernel")


@pytest.mark.parametrize("name", [*LOOKED_AT, *KEPT_APART])
def test_structure_agrees_with_the_ranges_of_a_capture(name: str, tmp_path: Path) -> None:
    found = compare(DATA / f"{name}.sqlite.xz", tmp_path)
    assert found.true == found.found
    assert found.share >= 0.94


PROGRAMS = sorted((DATA / "structure").glob("*.sqlite.xz"))


@pytest.mark.parametrize("capture", PROGRAMS, ids=lambda path: path.name.partition(".")[0])
def test_structure_finds_the_blocks_of_programs_that_it_was_not_written_by(capture: Path, tmp_path: Path) -> None:
    found = compare(capture, tmp_path)
    if capture.name.partition(".")[0] in WITHOUT_BLOCKS:
        assert found.found == 0
    else:
        assert found.right


def test_a_header_says_what_the_layers_are_from(tmp_path: Path) -> None:
    table = nvprof_kit.open(without_ranges(DATA / "eager-2024.2.sqlite.xz", tmp_path)).layers()
    assert any("4 blocks in 3 forward and 3 backward passes" in warning for warning in table.warnings)
    assert table.summary.by_how.keys() >= {"structure"}
    parts = {layer.rpartition(".")[2] for layer in table.rows["layer"] if layer.startswith("blocks.")}
    assert {"norm", "qkv", "attention", "out", "mlp_norm", "mlp"} <= parts


def program(path: Path, kernels: list[str]) -> Path:
    """A capture of kernels, one after another, without ranges."""
    file = NsysFile(path)
    for number, name in enumerate(kernels):
        at = 100 * number + 1
        file.kernel(at + 10, at + 60, launched=(at, at + 5), name=name)
    return file.write()


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_every_forward_numbers_its_blocks_alike(tmp_path: Path, passes: int) -> None:
    """A look-up, four blocks, a norm, a product and a choice of token, several times."""
    first, last = _EDGES
    forward = [first, *4 * _BLOCK, _NORM, _GEMM, last]
    rows = nvprof_kit.open(program(tmp_path / "a.sqlite", passes * forward)).layers().rows
    blocks = rows[rows["layer"].str.fullmatch(r"blocks\.\d")]
    assert blocks["layer"].tolist() == [f"blocks.{number}" for number in range(4)]
    assert set(blocks["calls"]) == {passes}
    assert set(blocks["gpu_total_ns"]) == {50 * len(_BLOCK) * passes}


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param([_GEMM, _NORM, _ADD] * 20, id="no attention"),
        pytest.param([_EDGES[0], *_BLOCK, _NORM, _GEMM, _EDGES[1]], id="one block"),
        pytest.param([f"kernel_{17 * number % 31}" for number in range(200)], id="names without an order"),
    ],
)
def test_no_layer_is_invented(tmp_path: Path, kernels: list[str]) -> None:
    table = nvprof_kit.open(program(tmp_path / "a.sqlite", kernels)).layers()
    assert set(table.rows["layer"]) == {"(none)"}
    assert any("shows no blocks that repeat" in warning for warning in table.warnings)
