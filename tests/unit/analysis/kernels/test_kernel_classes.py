"""Kernel classes: every rule recognises its examples, users' rules come first, and silence is said aloud."""

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.data import DATA

import nvprof_kit
from nvprof_kit.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RULES = tomllib.loads((Path(nvprof_kit.__file__).parent / "_analysis/kernels/classes.toml").read_text())["kernel"]


def classified(folder: Path, names: Iterable[str], **options: Path) -> dict[str, tuple[str, str]]:
    """Class and family of kernels, as `summary` has them."""
    file = NsysFile(folder / "run.sqlite")
    for number, name in enumerate(names):
        file.kernel(1_000 + 10 * number, 1_005 + 10 * number, launched=(10 * number, 10 * number + 5), name=name)
    rows = nvprof_kit.open(file.write(), **options).summary("kernel").to_frame()
    return {row.name: (row.kernel_class, row.family) for row in rows.itertuples(index=False)}


def test_a_rule_recognises_its_examples(tmp_path):
    assert all(rule["example"] for rule in RULES)
    examples = [(rule, [rule["example"]] if isinstance(rule["example"], str) else rule["example"]) for rule in RULES]
    expected = {name: (rule["class"], rule["name"]) for rule, names in examples for name in names}
    assert classified(tmp_path, expected) == expected


def test_a_range_that_spans_the_capitals_matches_them(tmp_path):
    (rules := tmp_path / "rules.toml").write_text('[[kernel]]\nname = "own"\nclass = "gemm"\nmatch = ["[ -_]foo"]\n')
    assert classified(tmp_path, ["Zfoo"], rules=rules) == {"Zfoo": ("gemm", "own")}


def test_labelled_names_of_real_kernels_have_their_class(tmp_path):
    with (DATA / "kernel-names.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) >= 600
    assert {row["class"] for row in rows} == {rule["class"] for rule in RULES}
    found = classified(tmp_path, (row["name"] for row in rows))
    assert [row for row in rows if found[row["name"]][0] != row["class"]] == []


def test_time_in_collectives_is_that_of_their_class(file):
    names = [name for rule in RULES for name in ([rule["example"]], rule["example"])[type(rule["example"]) is list]]
    for number, name in enumerate(names):
        file.kernel(1_000 + 10 * number, 1_005 + 10 * number, launched=(10 * number, 10 * number + 5), name=name)
    rows = nvprof_kit.open(file.write()).layers(columns="class").to_frame()
    assert rows["comm_ns"].sum() == rows["class_comm_ns"].sum() > 0


def test_what_matches_no_rule_is_other_and_told(file):
    file.range_("step 1", 90, 128, category="step", payload=1)
    file.kernel(300, 330, launched=(110, 115), name="nvjet_sm90_tst")
    file.kernel(330, 350, launched=(120, 125), name="strange")
    file.kernel(350, 355, launched=(130, 135), name="stranger")
    file.kernel(360, 361, launched=(140, 145), table="MEMCPY")
    capture = nvprof_kit.open(file.write())
    summary = capture.summary("kernel", steps="all")
    classes = summary.to_frame().set_index("name")["kernel_class"].to_dict()
    assert classes == {"nvjet_sm90_tst": "gemm", "strange": "other", "stranger": "other"}
    (warning,) = (warning for warning in summary.warnings if "class rule" in warning)
    # 25 of 56 ns
    assert warning.startswith("2 kernel names, 44.6 % of the time, matched no class rule") and "'strange'" in warning
    assert warning in capture.summary("kernel").warnings and warning in capture.breakdown().warnings


@pytest.mark.parametrize(
    ("ranges", "layer"),
    [("", "layers.0"), ("otherwise = 'layer'", "layers.0"), ("[[rule]]\nmatch = 'layers.*'\nlayer = 'block'", "block")],
)
def test_kernels_and_ranges_have_rules_in_one_file(ranges, layer, file, tmp_path):
    file.range_("layers.0", 100, 200, category=None)
    file.kernel(300, 330, launched=(110, 115), name="frobnicate")
    own = tmp_path / "own.toml"
    own.write_text(ranges + "\n[[kernel]]\nname = 'own'\nclass = 'softmax'\nmatch = 'FROB'\n")
    rows = nvprof_kit.open(file.write(), rules=own, domain="nvprof_kit").layers(columns="class").to_frame()
    assert rows.set_index("layer").loc[layer, "class_softmax_ns"] == 30


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kernel = 3", "kernel is not a list of tables; write each below a line [[kernel]]"),
        ("[[kernel", "not TOML"),
        ("[[kernel]]\nname = 'a'\nclass = 'gemm'", "kernel 1: lacks match"),
        ("[[kernel]]\nname = 'a'\nclass = 'gem'\nmatch = 'x'", "no class 'gem'"),
        ("[[kernel]]\nname = 'a'\nclass = 'gemm'\nmatch = '('", "not a regular expression"),
        ("[[kernel]]\nname = 'a'\nclass = 'gemm'\nmatch = 'x'\nkind = 'y'", "unknown kind"),
        ("kernel = [1]", "kernel is not a list of tables"),
        ("[[kernel]]\nname = 'a'\nclass = ['gemm']\nmatch = 'x'", "no class ['gemm']"),
        ("[[kernel]]\nname = 'a'\nclass = 'gemm'\nmatch = 5", "match = 5; needed a text"),
        ("[[kernel]]\nname = 'a'\nclass = 'gemm'\nmatch = []", "match = []; needed a text"),
        ("[[kernel]]\nname = 'a'\nclass = 'gemm'\nmatch = 'x'\nexample = 5", "example = 5; needed a text"),
    ],
)
def test_a_wrong_rule_is_one_clear_line(text, complaint, tmp_path):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(UsageError, match=r"own\.toml") as caught:
        classified(tmp_path, ["a"], rules=tmp_path / "own.toml")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value).replace(text, "")
