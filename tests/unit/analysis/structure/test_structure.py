"""Layers from the order of kernels alone, compared with what the same captures' own ranges name."""

import json
import re
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.cli import run
from support.data import DATA
from support.structure_truth import KEPT_APART, LOOKED_AT, WITHOUT_BLOCKS, compare, without_ranges

import nvprof_kit

_GEMM, _NORM, _ADD = (
    "nvjet_sm90_tst",
    "void rms_norm_kernel<float>(T1)",
    "void elementwise_kernel<CUDAFunctor_add<float>>(T1)",
)
_FORWARD = "void flash_fwd_kernel<T>(T1)"
_BLOCK = (_NORM, _GEMM, _FORWARD, _GEMM, _ADD, _NORM, _GEMM, "silu_kernel", _GEMM, _ADD)
_EDGES = ("vectorized_gather_kernel", "argmax_kernel")


@pytest.mark.parametrize("name", [*LOOKED_AT, *KEPT_APART])
def test_structure_agrees_with_the_ranges_of_a_capture(name, tmp_path):
    found = compare(DATA / f"{name}.sqlite.xz", tmp_path)
    assert found.true == found.found
    assert found.share >= 0.94


PROGRAMS = sorted((DATA / "structure").glob("*.sqlite.xz"))


@pytest.mark.parametrize("capture", PROGRAMS, ids=lambda path: path.name.partition(".")[0])
def test_structure_finds_the_blocks_of_programs_that_it_was_not_written_by(capture, tmp_path):
    found = compare(capture, tmp_path)
    if capture.name.partition(".")[0] in WITHOUT_BLOCKS:
        assert found.found == 0
    else:
        assert found.true == found.found and found.share >= 0.95


def test_a_header_says_what_the_layers_are_from(tmp_path):
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


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param([_GEMM, _NORM, _ADD] * 20, id="no attention"),
        pytest.param([_EDGES[0], *_BLOCK, _NORM, _GEMM, _EDGES[1]], id="one block"),
        pytest.param([f"kernel_{17 * number % 31}" for number in range(200)], id="names without an order"),
        pytest.param([_NORM, "conv_depthwise2d_forward_kernel", _GEMM, "gelu", _GEMM, _ADD] * 20, id="convolutions"),
        pytest.param(
            [*["fprop_implicit_gemm", "bn_fw_inf", "relu"] * 8, _GEMM, "softmax_warp_forward<float, 10, false>"] * 6,
            id="a convolutional network that classifies",
        ),
    ],
)
def test_no_layer_is_invented(tmp_path, kernels):
    table = nvprof_kit.open(program(tmp_path / "a.sqlite", kernels)).layers()
    assert set(table.rows["layer"]) == {"(none)"}
    assert any("shows no blocks that repeat" in warning for warning in table.warnings)


def test_a_model_without_attention_has_the_kernels_that_recur(tmp_path):
    """RWKV's scan, say, is a loop of small kernels: as many as there are words."""
    block = [_NORM, _GEMM, *["mul_kernel", "exp_kernel"] * 5, _GEMM, _ADD, "layer_norm_kernel", _GEMM, "relu", _ADD]
    capture = program(tmp_path / "a.sqlite", [_EDGES[0], *block * 5, _NORM, _EDGES[1]] * 2)
    assert block_names(capture) == {f"blocks.{number}" for number in range(5)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_block_has_all_its_attentions(count, tmp_path):
    """A decoder's two, to itself and to an encoder; some have three."""
    attentions = [kernel for number in range(count) for kernel in (*_BLOCK[:5], *["gelu"] * (6 * number))]
    block = [*attentions, *_BLOCK[5:]]
    capture = program(tmp_path / "a.sqlite", [_EDGES[0], *block * 5, _NORM, _GEMM, _EDGES[1]] * 2)
    assert block_names(capture) == {f"blocks.{number}" for number in range(5)}
    parts = set(nvprof_kit.open(capture).layers().rows["layer"])
    assert ("blocks.2.cross_attention" in parts) == (count > 1)


@pytest.mark.parametrize(("first", "last", "calls"), [(17, 0, 3), (0, 17, 4), (17, 17, 3)])
def test_a_capture_that_begins_or_ends_within_a_pass_has_the_blocks_of_the_others(first, last, calls, tmp_path):
    kernels = [_EDGES[0], *_BLOCK * 5, _NORM, _GEMM, _EDGES[1]] * 4
    rows = nvprof_kit.open(program(tmp_path / "a.sqlite", kernels[first : len(kernels) - last])).layers().rows
    blocks = rows[rows["layer"].str.fullmatch(r"blocks\.\d")].set_index("layer")["calls"]
    assert set(blocks.index) == {f"blocks.{number}" for number in range(5)}
    assert blocks["blocks.0"] == calls
    assert blocks["blocks.4"] == (3 if last else 4)


def test_angles_before_the_first_block_tell_the_steps_of_a_diffusion_model_apart(tmp_path):
    """Its second step runs other kernels for its products."""
    step = ["sin_kernel_cuda", "cos_kernel_cuda", _GEMM, *_BLOCK * 4, _NORM, _GEMM]
    other = ["sm90_other_gemm_kernel" if kernel == _GEMM else kernel for kernel in step]
    capture = program(tmp_path / "a.sqlite", [*step, *other] * 2)
    assert block_names(capture) == {f"blocks.{number}" for number in range(4)}


def test_an_attention_that_pools_what_the_blocks_give_is_none_of_them(tmp_path: Path) -> None:
    head = ["expand_kernel", _GEMM, _FORWARD, "sum_kernel", "tanh_kernel"]
    capture = program(tmp_path / "a.sqlite", [_EDGES[0], *_BLOCK * 5, *head, _EDGES[1]] * 2)
    assert block_names(capture) == {f"blocks.{number}" for number in range(5)}


def test_of_many_passes_that_repeat_none_before_the_others_are_given_up(tmp_path):
    numbers = iter(range(10**9))
    kernels: list[str] = []
    while len(kernels) < 60_000:
        parts = [part for _ in range(24) for part in (*_BLOCK[:5], *(f"k{next(numbers) % 97}",) * 40, *_BLOCK[5:])]
        kernels += [_EDGES[0], *parts, _NORM, _GEMM, _EDGES[1]]
    table = nvprof_kit.open(program(tmp_path / "a.sqlite", kernels)).layers()
    assert any(re.search(r"24 blocks in .* no repetition found in \d+ of \d+ passes", text) for text in table.warnings)


def config(path: Path, model_type: str, architecture: str, **fields: object) -> Path:
    """A ``config.json`` as Hugging Face writes it."""
    path.write_text(json.dumps({"model_type": model_type, "architectures": [architecture], **fields}))
    return path


def block_names(capture: Path, model: Path | None = None) -> set[str]:
    """The names of the layers that end in a number."""
    rows = nvprof_kit.open(capture, model=model).layers(steps="all").rows
    return {layer for layer in rows["layer"] if re.fullmatch(r"(?:[a-z_]+\d?\.)*\d+", layer)}


@pytest.mark.parametrize(
    ("name", "model_type", "architecture", "counts"),
    [
        ("bert", "bert", "BertForMaskedLM", {"num_hidden_layers": 6}),
        ("deepseekv3", "deepseek_v3", "DeepseekV3ForCausalLM", {"num_hidden_layers": 6}),
        ("gpt2", "gpt2", "GPT2LMHeadModel", {"n_layer": 6}),
        ("mixtral-generate", "mixtral", "MixtralForCausalLM", {"num_hidden_layers": 6}),
        ("t5-generate", "t5", "T5ForConditionalGeneration", {"num_layers": 4, "num_decoder_layers": None}),
        ("whisper", "whisper", "WhisperForConditionalGeneration", {"encoder_layers": 4, "decoder_layers": 4}),
    ],
)
def test_a_config_gives_blocks_the_names_that_annotation_gives(name, model_type, architecture, counts, tmp_path):
    model = config(tmp_path / "config.json", model_type, architecture, **counts)
    capture = DATA / "structure" / f"{name}.sqlite.xz"
    bare = without_ranges(capture, tmp_path)
    assert block_names(bare, model) == block_names(capture)
    table = nvprof_kit.open(bare, model=model).layers()
    assert sum("config.json agrees" in warning for warning in table.warnings) == 1
    assert table.summary.by_how.keys() >= {"structure"}
    assert table.rows["gpu_self_ns"].sum() == nvprof_kit.open(bare).layers().rows["gpu_self_ns"].sum()


def test_blocks_that_become_others_on_the_way_are_two_stacks(tmp_path):
    """Flux's double blocks, then its single ones; blocks of which only the MLPs differ are one stack."""
    flux, deepseek = (
        without_ranges(DATA / "structure" / f"{name}.sqlite.xz", tmp_path) for name in ("flux", "deepseekv3")
    )
    stacks = {f"stack{stack}.blocks.{number}" for stack, count in enumerate((3, 6)) for number in range(count)}
    assert block_names(flux) == stacks
    assert block_names(deepseek) == {f"blocks.{number}" for number in range(6)}


@pytest.mark.parametrize(
    ("capture", "architecture", "layers", "names", "sentence"),
    [
        ("llama", "LlamaModel", 6, "layers", "config.json agrees: 6 blocks; blocks are named layers"),
        ("llama", "LlamaForCausalLM", 7, "blocks", "config.json says 7 blocks, the capture shows 6 blocks; no name"),
        ("llama", "NewForCausalLM", 6, "blocks", "paths are not known for model_type 'new', so they stay"),
        ("random-ops", "LlamaForCausalLM", 6, "", "config.json says 6 blocks, the capture shows none"),
    ],
)
def test_a_config_that_differs_or_is_not_known_names_and_invents_nothing(
    capture, architecture, layers, names, sentence, tmp_path
):
    model_type = "new" if architecture.startswith("New") else "llama"
    model = config(tmp_path / "config.json", model_type, architecture, num_hidden_layers=layers)
    bare = without_ranges(DATA / "structure" / f"{capture}.sqlite.xz", tmp_path)
    assert block_names(bare, model) == {f"{names}.{number}" for number in range(6) if names}
    assert sum(sentence in warning for warning in nvprof_kit.open(bare, model=model).layers().warnings) == 1


def test_a_config_checks_the_blocks_of_an_annotated_capture(tmp_path):
    capture = DATA / "structure" / "llama.sqlite.xz"
    for layers, sentences in ((6, 0), (5, 1)):
        model = config(tmp_path / "config.json", "llama", "LlamaForCausalLM", num_hidden_layers=layers)
        warnings = nvprof_kit.open(capture, model=model).layers().warnings
        assert sum("the capture shows 6 model.layers" in warning for warning in warnings) == sentences
        assert block_names(capture, model) == block_names(capture)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read it: No such file"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no number of layers; needed a positive num_hidden_layers or n_layer"),
        (b'{"num_hidden_layers": -1}', "-1 as number of layers"),
        (b'{"num_hidden_layers": "6"}', "'6' as number of layers"),
        (b'{"num_hidden_layers": true}', "True as number of layers"),
        (b'{"model_type": "bart", "encoder_layers": 6}', "needed a positive decoder_layers or"),
    ],
)
def test_a_bad_config_is_refused_in_one_line(content, sentence, tmp_path):
    model = tmp_path / "config.json"
    if content is not None:
        model.write_bytes(content)
    with pytest.raises(nvprof_kit.UsageError, match=re.escape(sentence)) as raised:
        nvprof_kit.open(DATA / "structure" / "llama.sqlite.xz", model=model)
    assert str(raised.value).startswith(f"--model {model}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("verb", ["layers", "breakdown", "summary", "advise", "report"])
@pytest.mark.parametrize("name", ["graph-whole-2024.2", "structure/random-ops"])
def test_every_verb_answers_a_capture_without_ranges_or_blocks(name, verb, tmp_path):
    bare = without_ranges(DATA / f"{name}.sqlite.xz", tmp_path)
    assert run(verb, bare, *(["-o", tmp_path / "report.html"] if verb == "report" else [])) == 0
