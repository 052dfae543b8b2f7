"""Kernel classes: every rule recognises its examples, users' rules come first, and silence is said aloud."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.kernels.classes import (
    CLASSES,
    UNMATCHED,
    Family,
    Rule,
    built_in_rules,
    classify,
    family_of,
    parse_rules,
)
from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import UsageError

DATA = Path(__file__).parents[3] / "data"
OWN = """
[[rule]]
name = "ours"
class = "attention"
match = "my_kernel"
"""


@pytest.mark.parametrize("rule", built_in_rules(), ids=lambda rule: rule.name)
def test_a_rule_recognises_its_examples(rule: Rule) -> None:
    assert rule.example
    for name in rule.example:
        assert family_of(name) == Family(rule.kernel_class, rule.name), name


def test_every_class_but_none_is_told_by_some_rule() -> None:
    assert {rule.kernel_class for rule in built_in_rules()} == set(CLASSES)


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)", "comm"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "comm"),
        ("void (anonymous namespace)::twoshot_allreduce_kernel<__half>(__half*)", "comm"),
        ("void c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int)", "comm"),
        ("void all_to_all_vdev_kernel(long*)", "comm"),
        ("fsdp::all_gather_copy_in", "other"),
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int, int const*)", "copy"),
        ("triton_poi_fused_moe_forward_0", "elementwise"),
        ("triton_poi_fused_add_all_gather_into_tensor_wait_tensor_0", "elementwise"),
        ("void LayerNorm<BlockAllReduce, float>(float*)", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "reduction"),
        ("triton_red_fused_native_layer_norm_backward_9", "norm"),
        ("triton_poi_fused__softmax_backward_data_2", "softmax"),
        ("triton_poi_fused_mul_silu_1", "elementwise"),
        ("triton_tem_fused_addmm_relu_7", "gemm"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float>(float*)", "softmax"),
        ("my_own_kernel", "other"),
    ],
)
def test_names_of_libraries_and_generators(name: str, kernel_class: str) -> None:
    assert family_of(name).kernel_class == kernel_class


def test_labelled_names_of_real_kernels_have_their_class() -> None:
    with (DATA / "kernel-names.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) >= 600
    assert {row["class"] for row in rows} == set(CLASSES)
    assert [row for row in rows if family_of(row["name"]).kernel_class != row["class"]] == []


def test_rules_of_a_user_are_asked_first() -> None:
    own = parse_rules(OWN, "own.toml")
    assert family_of("my_kernel_elementwise_kernel", own_rules=own) == Family("attention", "ours")
    assert family_of("nvjet_sm90", own_rules=own).kernel_class == "gemm"


def test_classes_of_operations_and_what_matched_nothing(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("layers.0", 100, 200)
    file.kernel(300, 330, launched=(110, 115), name="nvjet_sm90_tst")
    file.kernel(330, 350, launched=(120, 125), name="strange")
    file.kernel(350, 355, launched=(130, 135), name="stranger")
    file.kernel(360, 361, launched=(140, 145), table="MEMCPY")
    found = classify(open_capture(file.write(), optional=("name",)).ops)
    assert [list(CLASSES)[code] for code in found.code] == ["gemm", "other", "other", "copy"]
    assert [found.families[family].name for family in found.family] == ["cuBLAS nvjet", UNMATCHED, UNMATCHED, "memcpy"]
    assert found.unmatched.to_dict("list") == {"name": ["strange", "stranger"], "count": [1, 1], "gpu_ns": [20, 5]}
    # 25 of 56 ns
    assert found.warnings(56)[0].startswith("2 kernel names, 44.6 % of the time, matched no class rule")
    assert "'strange'" in found.warnings(56)[0]


@pytest.mark.parametrize("capture", sorted(DATA.glob("*.sqlite.xz")), ids=lambda path: path.name.partition(".")[0])
def test_every_kernel_of_a_real_capture_is_recognised(capture: Path) -> None:
    found = classify(open_capture(capture, optional=("name",)).ops)
    assert found.unmatched["name"].tolist() == []
    assert found.warnings(1) == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rule = 3", "no [[rule]]"),
        ("[[rule", "not TOML"),
        ("[[rule]]\nname = 'a'\nclass = 'gemm'", "rule 1: lacks match"),
        ("[[rule]]\nname = 'a'\nclass = 'gem'\nmatch = 'x'", "no class 'gem'"),
        ("[[rule]]\nname = 'a'\nclass = 'gemm'\nmatch = '('", "not a regular expression"),
        ("[[rule]]\nname = 'a'\nclass = 'gemm'\nmatch = 'x'\nkind = 'y'", "unknown kind"),
        ("rule = [1]", "rule 1: not a table"),
        ("[[rule]]\nname = 'a'\nclass = ['gemm']\nmatch = 'x'", "no class ['gemm']"),
        ("[[rule]]\nname = 'a'\nclass = 'gemm'\nmatch = 5", "match = 5; needed a text"),
        ("[[rule]]\nname = 'a'\nclass = 'gemm'\nmatch = []", "match = []; needed a text"),
        ("[[rule]]\nname = 'a'\nclass = 'gemm'\nmatch = 'x'\nexample = 5", "example = 5; needed a text"),
    ],
)
def test_a_wrong_rule_is_one_clear_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=r"own\.toml") as caught:
        parse_rules(text, "own.toml")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value).replace(text, "")
