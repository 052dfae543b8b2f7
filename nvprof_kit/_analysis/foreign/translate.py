"""Translates captures of other programs to this package's range names.

`translate` renames the ranges by rules. If the backward pass has no ranges of its own, it derives them from autograd
operators. The result is a regular `Trace`; the recorded data is unchanged.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Int64Array, Nesting, inherit, nest, outer_layers
from nvprof_kit._analysis.foreign import autograd_links as links
from nvprof_kit._analysis.foreign.rules import OPERATORS, PAIR, Rules, preset, presets
from nvprof_kit._trace.frames import MISSING_PAYLOAD, labels, make_frame
from nvprof_kit._trace.schema import SOUGHT, Trace
from nvprof_kit._trace.validate import lost_launches
from nvprof_kit.issues import Issue
from nvprof_kit.names import DOMAIN, LAYER_PHASES, Category, RangeName

BLOCK = re.compile(r"\.\d+(?:\.|$)")
"""Found in the path of a layer that is one of several alike."""

_FORWARD, _BACKWARD = (Category.FORWARD, Category.RECOMPUTE), (Category.BACKWARD,)
_AS_RECORDED = ("start_ns", "end_ns", "pid", "tid", "nested", "left_open")


def translate(trace: Trace, rules: Rules | None = None) -> Trace:
    """Translate the ranges of a capture.

    Args:
        trace: The capture as it was read.
        rules: How its program names its ranges; None if it follows this package's naming.

    Returns:
        The capture with a range for every layer forward and backward that rules and operators identify. A backward
        range derived from operators is an interval in which the layer's nodes ran one after another.
        `CaptureInfo.warnings` says how many were found. A capture that needs no translation is returned unchanged.
    """
    if rules is not None and not rules.rules:  # a file with rules for classes of kernels alone
        rules = None
    if trace.info.evidence == SOUGHT:
        trace = replace(trace, info=replace(trace.info, evidence=""))
        if rules is None:
            return _from_evidence(trace)
    if rules is None and trace.operators is None:
        return trace
    return _by_rules(trace, rules)


def _from_evidence(trace: Trace) -> Trace:
    """Take the layers of a capture without ranges of ours from the first evidence that it has: ranges of a known
    program, module events, the order of kernels, operators, and any ranges.
    """
    from nvprof_kit._analysis.structure.structure import EVIDENCE, add_structure

    layers = [text for text in trace.ranges["text"].cat.categories if BLOCK.search(str(text))]
    if trace.info.domain == DOMAIN and layers:  # module events of PyTorch
        named = _by_rules(trace, None) if trace.operators is not None else trace
        share = _share_in_blocks(named)
        if share <= 1 / 3:  # most of the time may be in a compiled model, which is one module
            old = trace.ranges["category"].cat
            categories = [Category.USER.value if name in LAYER_PHASES else name for name in old.categories]
            ranges = trace.ranges.assign(category=labels(old.codes.to_numpy(), categories))
            warnings = tuple(issue for issue in trace.info.warnings if issue.code != "class-names")
            info = replace(trace.info, warnings=warnings)
            structured = add_structure(replace(trace, info=info, ranges=ranges, operators=None))
            named = structured if _share_in_blocks(structured) > 2 * share else named
        return named
    rules = recognise(trace) if trace.info.domain != DOMAIN else None
    if rules is not None and _Renamed(trace, rules).is_a(_FORWARD).any():
        issue = Issue.of("recognised", program=rules.title)
        info = replace(trace.info, evidence=rules.title, warnings=(*trace.info.warnings, issue))
        return _by_rules(replace(trace, info=info), rules)
    structured = add_structure(trace)
    if structured.info.evidence == EVIDENCE:
        return replace(structured, operators=None)
    if rules is not None or trace.operators is not None:
        return _by_rules(trace, rules)
    if not len(trace.ranges):
        return structured
    return _by_rules(trace, preset("torch-nvtx")) if trace.info.domain != DOMAIN else trace


def _share_in_blocks(trace: Trace) -> float:
    """The share of the GPU time that is in layers with a number."""
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    tid, time = (
        np.where(
            trace.created_nodes == NONE,
            np.append(trace.api[name].to_numpy(), missing)[trace.launching_calls],
            np.append(trace.graph_nodes[name].to_numpy(), missing)[trace.created_nodes],
        )
        for name, missing in (("tid", NONE), ("start_ns", 0))
    )
    nesting = nest(*(trace.ranges[name].to_numpy() for name in ("start_ns", "end_ns", "tid")))
    is_layer = trace.ranges["category"].isin(LAYER_PHASES) & trace.ranges["text"].str.contains(BLOCK)
    block = np.append(_nearest(is_layer.to_numpy(), nesting), NONE)
    return float((end - start)[block[nesting.innermost(tid, time)] != NONE].sum() / max((end - start).sum(), 1))


def _by_rules(trace: Trace, rules: Rules | None) -> Trace:
    """Translate the ranges by rules, and derive the backward pass from operators."""
    ranges = _Renamed(trace, rules)
    warnings = ranges.warnings()
    operators = ranges.operators() if trace.operators is None else trace.operators
    if len(operators) and not ranges.annotates_backward():
        if not ranges.is_a(_FORWARD).any():
            ranges.add_operators(trace.operators)
            warnings.append(Issue.of("operators-as-layers"))
        warnings += ranges.link(operators)
    trace = replace(trace, ranges=ranges.frame(), operators=None)
    return replace(trace, info=replace(trace.info, warnings=(*trace.info.warnings, *warnings, *lost_launches(trace))))


def recognise(trace: Trace) -> Rules | None:
    """The rules of the known program whose ranges a capture has, by the texts that they match; None if it has none."""
    text = trace.ranges["text"].cat
    counts = np.bincount(text.codes.to_numpy()[text.codes.to_numpy() >= 0], minlength=len(text.categories))
    best: tuple[float, Rules | None] = (0.0, None)
    for name in presets():
        rules = preset(name)
        meanings = [rules.meaning(str(category)) for category in text.categories]
        layers = sum(
            count
            for meaning, count in zip(meanings, counts.tolist(), strict=True)
            if meaning.ruled and (meaning.name.category is Category.FORWARD or meaning.operator)
        )
        if layers > best[0]:
            best = (layers, rules)
    return best[1]


class _Renamed:
    """The ranges of a capture during translation.

    Attributes:
        rows: The ranges, with an index into `names` in place of category and text.
        names: Their names; those of `meanings` come first.
        meanings: The meanings of the distinct recorded ranges.
        meaning: That of each recorded range, an index into `meanings`; the other ranges stand behind them.
    """

    def __init__(self, trace: Trace, rules: Rules | None) -> None:
        self._rules, recorded = rules, trace.ranges[["text", "category"]]
        self._cut_pairs: dict[str, None] = {}  # in their order
        self.meaning = recorded.groupby([*recorded], observed=True, sort=False).ngroup().to_numpy()
        texts = recorded.drop_duplicates().itertuples(index=False, name=None)
        of_program = rules or Rules("nvprof_kit", otherwise="layer")
        self.meanings = [of_program.meaning(text, category or None) for text, category in texts]
        self.names = [meaning.name for meaning in self.meanings]
        payload = trace.ranges["payload"].to_numpy(dtype=np.int64, na_value=MISSING_PAYLOAD)
        self.rows = trace.ranges[[*_AS_RECORDED]].reset_index(drop=True).assign(payload=payload, name=self.meaning)
        if any(name.text.startswith(".") for name in self.names):
            self._continue_paths()
        if any(meaning.pair for meaning in self.meanings):
            self._add_pairs()

    def is_a(self, categories: tuple[Category, ...]) -> Bools:
        """Which ranges have one of these categories."""
        is_one = np.array([name.category in categories for name in self.names], dtype=bool)
        of_rows: Bools = is_one[self.rows["name"].to_numpy()]
        return of_rows

    def annotates_backward(self) -> bool:
        """Whether the program itself annotated its backward pass; a rule for a single function's backward does not
        count.
        """
        return any(not meaning.ruled and meaning.name.category is Category.BACKWARD for meaning in self.meanings)

    def warnings(self) -> list[Issue]:
        """Which layers the window cuts, and how many ranges no rule matches."""
        issues: list[Issue] = []
        if self._cut_pairs:
            layers = ", ".join([*self._cut_pairs][:4]) + (", …" if len(self._cut_pairs) > 4 else "")
            issues.append(Issue.of("cut", count=len(self._cut_pairs), layers=layers))
        is_loose = np.array(
            [not meaning.ruled and meaning.name.category is Category.USER for meaning in self.meanings], dtype=bool
        )[self.meaning]
        if self._rules is not None and self._rules.otherwise != "layer" and is_loose.any():
            example = self.meanings[self.meaning[np.argmax(is_loose)]].name.text
            example = example if len(example) <= 60 else f"{example[:57]}..."
            facts = {"count": np.count_nonzero(is_loose), "total": len(is_loose), "program": self._rules.title}
            issues.append(Issue.of("no-rule", float(is_loose.mean()), example=example, **facts))
        return issues

    def _add_pairs(self) -> None:
        """Add the layers that two ranges bound, on the thread of both, and name what runs inside them."""
        side = np.array([meaning.pair for meaning in self.meanings], dtype=object)[self.meaning]
        of_thread = self.rows.groupby("tid")
        first, last = of_thread["start_ns"].min(), of_thread["end_ns"].max()
        bounds: list[tuple[int, int, int, int, str]] = []
        open_since: dict[tuple[int, int, str], int] = {}
        for row in self.rows[side != ""].sort_values(["tid", "start_ns"], kind="stable").itertuples():
            layer = row.pid, row.tid, self.names[row.name].text
            if side[row.Index] == PAIR[0]:
                open_since[layer] = row.start_ns
                continue
            if layer not in open_since:  # begun before the window
                self._cut_pairs[layer[2]] = None
            bounds.append((open_since.pop(layer, first[row.tid]), row.end_ns, *layer))
        for layer, start_ns in open_since.items():  # not ended in the window
            self._cut_pairs[layer[2]] = None
            bounds.append((start_ns, last[layer[1]], *layer))
        layers = pd.DataFrame(bounds, columns=["start_ns", "end_ns", "pid", "tid", "text"])
        name, texts = pd.factorize(layers.pop("text"), sort=True)
        recorded = len(self.rows)
        self._append(layers, [RangeName(text, Category.FORWARD) for text in texts], name)
        parent, name = self._nesting().parent[:recorded], self.rows["name"].to_numpy(copy=True)
        for row in np.flatnonzero(parent >= recorded).tolist():
            meaning = self.meanings[self.meaning[row]]
            is_operator = meaning.operator == OPERATORS[0]
            part_name = meaning.part or (meaning.name.text.rpartition("::")[2] if is_operator else "")
            if part_name:
                path = f"{self.names[name[parent[row]]].text}.{part_name}"
                name[row] = len(self.names)
                self.names.append(RangeName(path, Category.FORWARD))
        self.rows["name"] = name

    def operators(self) -> pd.DataFrame:
        """The operators among the ranges, according to the rules."""
        kind, sequence = (
            np.array([getattr(meaning, name) for meaning in self.meanings], dtype=dtype)[self.meaning]
            for name, dtype in (("operator", object), ("sequence", np.int64))
        )
        recorded = self.rows.iloc[: len(kind)][["start_ns", "end_ns", "pid", "tid"]].assign(
            backward=kind != OPERATORS[0], engine=kind == OPERATORS[1], sequence=sequence, forward_tid=NONE
        )
        operators: pd.DataFrame = recorded[kind != ""].reset_index(drop=True)
        return operators

    def add_operators(self, recorded: pd.DataFrame | None) -> None:
        """Treat forward operators as layers."""
        if recorded is None:
            for index, meaning in enumerate(self.meanings):
                if meaning.operator == OPERATORS[0] and meaning.sequence >= 0:
                    self.names[index] = self.names[index]._replace(category=Category.FORWARD)
            return
        forward = recorded[~recorded["backward"]]
        layers = [RangeName(str(text), Category.FORWARD) for text in forward["name"].cat.categories]
        self._append(forward, layers, np.asarray(forward["name"].cat.codes, np.int64))

    def link(self, operators: pd.DataFrame) -> list[Issue]:
        """Add the backward pass derived from the operators, and report how much of it was found."""
        nesting = self._nesting()
        layer_range = _nearest(self.is_a(_FORWARD), nesting)
        operators = links.whole_nodes(operators)
        maker = links.makers(operators)
        is_paired = maker != NONE
        of_node = np.full(len(operators), NONE, dtype=np.int64)
        tid, start = (operators[name].to_numpy()[maker[is_paired]] for name in ("tid", "start_ns"))
        of_node[is_paired] = np.append(layer_range, NONE)[nesting.innermost(tid, start)]
        owner = links.with_followers(operators, of_node)
        envelopes = links.envelopes(operators, owner, outer_layers(layer_range, nesting))
        texts = [RangeName(name.text, Category.BACKWARD) for name in self.names]
        self._append(envelopes, texts, self.rows["name"].to_numpy()[envelopes["layer_range"]])
        is_loose = operators["backward"] & (owner == NONE)
        self._append(operators[is_loose], [RangeName("backward", Category.PHASE)], 0)
        is_numbered = operators["backward"] & (operators["sequence"] >= 0)
        of_nodes = (True, is_paired, of_node != NONE)
        nodes, paired, in_layers = (int((is_numbered & is_node).sum()) for is_node in of_nodes)
        if not nodes:
            return []
        facts: dict[str, float] = {"nodes": nodes, "paired": paired, "in_layers": in_layers}
        facts |= {"pairs": paired / nodes, "layers": in_layers / nodes}
        if paired == nodes:
            return [Issue.of("sequence-numbers", **facts)]
        return [Issue.of("sequence-numbers:incomplete", 1 - paired / nodes, **facts)]

    def frame(self) -> pd.DataFrame:
        """The translated ranges as a table with the standard schema."""
        name = self.rows["name"].to_numpy()
        category = labels(name, [name.category.value for name in self.names])
        text = labels(name, [name.text for name in self.names])
        frame: pd.DataFrame = make_frame("ranges", {**self.rows, "category": category, "text": text})
        return frame

    def _nesting(self) -> Nesting:
        return nest(*(self.rows[name].to_numpy() for name in ("start_ns", "end_ns", "tid")))

    def _continue_paths(self) -> None:
        """Prepend the enclosing layer's path to each path that begins with a dot, from the outside in."""
        nesting, name = self._nesting(), self.rows["name"].to_numpy(copy=True)
        enclosing = outer_layers(_nearest(self.is_a(_FORWARD + _BACKWARD), nesting), nesting)[: len(name)]
        is_relative = np.array([name.text.startswith(".") for name in self.names], dtype=bool)[name]
        joined: dict[tuple[int, int], int] = {}
        for level in range(int(nesting.depth.max(initial=0)) + 1):
            here = np.flatnonzero(is_relative & (nesting.depth == level))
            outer = np.where(enclosing[here] == NONE, NONE, name[enclosing[here]])
            pairs, pair = np.unique(np.stack([outer, name[here]]), axis=1, return_inverse=True)
            numbers = []
            for path, inner in pairs.T.tolist():
                if (path, inner) not in joined:
                    before = self.names[path].text if path != NONE else ""
                    joined[path, inner] = len(self.names)
                    self.names.append(self.names[inner]._replace(text=(before + self.names[inner].text).strip(".")))
                numbers.append(joined[path, inner])
            name[here] = np.array(numbers, dtype=np.int64)[pair.ravel()]
        self.rows["name"] = name

    def _append(self, rows: pd.DataFrame, names: list[RangeName], name: Int64Array | int) -> None:
        """Add ranges, each with an index into their names."""
        added = rows[["start_ns", "end_ns", "pid", "tid"]].assign(
            nested=True, left_open=False, payload=MISSING_PAYLOAD, name=name + len(self.names)
        )
        self.rows = pd.concat([self.rows, added], ignore_index=True)
        self.names += names


def _nearest(is_layer: Bools, nesting: Nesting) -> Int64Array:
    """For each range, the nearest layer range (itself or an enclosing one), or `NONE`."""
    return inherit(np.where(is_layer, np.arange(len(is_layer)), NONE), nesting)
