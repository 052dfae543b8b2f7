"""Rules: what a range is by its text, from a file of the user's or a preset."""

import pytest
from support.data import DATA

from nvprof_kit._analysis.foreign.rules import parse_rules, preset
from nvprof_kit.errors import UsageError

OWN = """
title = "our trainer"
domain = "trainer"

[[rule]]
match = 'fwd/(?P<layer>[\\w.]+)'

[[rule]]
match = 'bwd/(?P<number>\\d+)/(?P<part>\\w+)'
layer = "layers.{number}.{part}"
phase = "backward"

[[rule]]
match = 'it(?P<step>\\d+)'

[[rule]]
match = '(?P<phase>allreduce|load)'

[[rule]]
match = 'noise.*'

[[rule]]
match = '(?P<plain>.+) #\\d+'

[[rule]]
match = 'op (?P<sequence>\\d+)'
operator = "forward"

[[rule]]
match = '.*'
category = "module"
layer = "by category"
"""


@pytest.mark.parametrize(
    ("text", "category", "expected"),
    [
        ("fwd/model.layers.3.mlp", None, "forward model.layers.3.mlp"),
        ("bwd/3/mlp", None, "backward layers.3.mlp"),
        ("it12", None, "step step 12"),
        ("allreduce", None, "phase"),
        ("noise of any kind", None, "user"),
        ("layers.1 #77", None, "forward layers.1"),
        ("anything", "module", "forward by category"),
        ("anything", None, "user"),  # otherwise = "nothing" unless said
        ("model.layers.3 backward", "backward", "backward model.layers.3"),  # what we emitted keeps it
        ("fwd/", None, "user"),  # the whole text must match
    ],
)
def test_a_file_of_rules(text, category, expected):
    assert_meaning(parse_rules(OWN, "own.toml").meaning(text, category).name, text, expected)


def assert_meaning(name, text, expected):
    """Expected are a category, and the text unless it stays."""
    category, _, changed = expected.partition(" ")
    assert (name.category.value, name.text) == (category, changed or text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[rule]\n", "not TOML"),
        ("title = 'x'", r"no \[\[rule\]\] in it"),
        ("[[rule]]\nlayer = 'x'", "rule 1: lacks match"),
        ("[[rule]]\nmatch = '('", r"rule 1: '\(' is not a regular expression"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{b}'", "rule 1: layer = '{b}' names an unknown group"),
        ("[[rule]]\nmatch = '.'\nlayr = 'x'", "rule 1: unknown key 'layr'"),
        ("[[rule]]\nmatch = '.'\nlayer = 'x'\nphase = 'fwd'", "rule 1: phase = 'fwd'"),
        ("[[rule]]\nmatch = '.'\nlayer = 3", "rule 1: layer = 3; every value must be a text"),
        ("[[rule]]\nmatch = '.'\noperator = 'x'", "rule 1: operator = 'x'"),
        ("otherwise = 'x'\n[[rule]]\nmatch = '.'", "otherwise = 'x'"),
        ("include = ['x']", "no preset 'x'; available: deepspeed, emit-nvtx"),
        ("include = 'vllm'", "include = 'vllm'; needed a list of texts"),
        ("sources = 5\n[[rule]]\nmatch = '.'", "sources = 5; needed a list of texts"),
        ("domain = 5\n[[rule]]\nmatch = '.'", "domain = 5; needed a text in quotes"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a.b}'", "rule 1: layer = '{a.b}' names an unknown group"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a.__class__}'", "names an unknown group"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a:>999999999}'", "names an unknown group"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a!r}'", "names an unknown group"),
        ("a = " + "[" * 5000, "not TOML: lists or tables inside each other too deep"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(text, complaint):
    with pytest.raises(UsageError, match=complaint) as error:
        parse_rules(text, "own.toml")
    assert "\n" not in str(error.value)


NAMES = (DATA / "range-names.tsv").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize("line", NAMES)
def test_presets(line):
    name, expected, text = line.split("\t")
    assert_meaning(preset(name).meaning(text).name, text, expected)
