"""Translates captures of other programs to this package's range names.

`translate` renames the ranges by rules. If the backward pass has no ranges of its own, it derives them from autograd
operators. The result is a regular `Trace`; the recorded data is unchanged.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, Nesting, inherit, nest, outer_layers
from nvprof_kit._analysis.foreign import autograd_links as links
from nvprof_kit._analysis.foreign.autograd_links import Operators
from nvprof_kit._analysis.foreign.rules import OPERATORS, PAIR, Meaning, Rules, preset, presets
from nvprof_kit._trace.frames import MISSING_PAYLOAD, labels, make_frame
from nvprof_kit._trace.schema import SOUGHT, Trace
from nvprof_kit.issues import Issue
from nvprof_kit.names import DOMAIN, LAYER_PHASES, Category, RangeName

BLOCK = re.compile(r"\.\d+(?:\.|$)")
"""Found in the path of a layer that is one of several alike."""

_FORWARD, _BACKWARD = (Category.FORWARD, Category.RECOMPUTE), (Category.BACKWARD,)
_OPERATOR_COLUMNS = ("start_ns", "end_ns", "pid", "tid", "backward", "engine", "sequence", "forward_tid")
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
        text = f"layers are from the ranges of {rules.title}, which were recognised; --rules or --domain overrides this"
        issue = Issue("recognised", "note", 1.0, text)
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
    block = np.append(inherit(np.where(is_layer, np.arange(len(is_layer)), NONE), nesting), NONE)
    return float((end - start)[block[nesting.innermost(tid, time)] != NONE].sum() / max((end - start).sum(), 1))


def _by_rules(trace: Trace, rules: Rules | None) -> Trace:
    """Translate the ranges by rules, and derive the backward pass from operators."""
    ranges = _Renamed(trace, rules)
    warnings = [*ranges.warnings()]
    operators = (
        ranges.operators()
        if trace.operators is None
        else Operators(*(trace.operators[name].to_numpy() for name in _OPERATOR_COLUMNS))
    )
    if len(operators) and not ranges.annotates_backward():
        if not ranges.is_a(_FORWARD).any():
            ranges.add_operators(trace.operators)
            text = (
                "no module's range beside the operators, so each operator stands for a layer; record with stacks "
                "(with_stack=True), or range the modules: nvprof_kit.annotate_model(model, backward=False)"
            )
            warnings.append(Issue("operators-as-layers", "warning", 1.0, text))
        warnings += ranges.link(operators)
    return replace(
        trace,
        info=replace(trace.info, warnings=(*trace.info.warnings, *warnings)),
        ranges=ranges.frame(),
        operators=None,
    )


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
    """The ranges of a capture during translation: columns, and an index into names for each range."""

    def __init__(self, trace: Trace, rules: Rules | None) -> None:
        frame = trace.ranges
        self._columns: dict[str, Any] = {name: frame[name].to_numpy() for name in _AS_RECORDED}
        self._columns["payload"] = frame["payload"].to_numpy(dtype=np.int64, na_value=MISSING_PAYLOAD)
        self._rules = rules
        meanings, self._meaning = _meanings(frame, rules)
        self._meanings = meanings
        self._names = [meaning.name for meaning in meanings]
        self._name = self._meaning.astype(np.int64)
        if any(name.text.startswith(".") for name in self._names):
            self._continue_paths()
        self._cut_pairs: list[str] = []
        self._add_pairs()

    def is_a(self, categories: tuple[Category, ...]) -> npt.NDArray[np.bool_]:
        """Which ranges have one of these categories."""
        return _flags(self._names, lambda name: name.category in categories)[self._name]

    def annotates_backward(self) -> bool:
        """Whether the program itself annotated its backward pass; a rule for a single function's backward does not
        count.
        """
        backward = _flags(self._meanings, lambda one: not one.ruled and one.name.category is Category.BACKWARD)
        return bool(backward[self._meaning].any())

    def warnings(self) -> list[Issue]:
        """How many ranges no rule matches."""
        cut: list[Issue] = []
        if self._cut_pairs:
            named = ", ".join([*dict.fromkeys(self._cut_pairs)][:4])
            text = f"{len(self._cut_pairs)} layers are cut by the window's edge, so only a part of them counts: {named}"
            cut.append(Issue("cut", "note", 1.0, text))
        if self._rules is None or self._rules.otherwise == "layer":
            return cut
        loose = _flags(self._meanings, lambda one: not one.ruled and one.name.category is Category.USER)[self._meaning]
        if not loose.any():
            return cut
        example = self._meanings[int(self._meaning[np.argmax(loose)])].name.text
        example = example if len(example) <= 60 else f"{example[:57]}..."
        text = (
            f"{np.count_nonzero(loose)} of {len(loose)} ranges fit no rule for {self._rules.title} and count for "
            f"nothing ({example!r} is one); write a rule, or leave --rules out to take them for layers"
        )
        return [*cut, Issue("no-rule", "warning", np.count_nonzero(loose) / len(loose), text)]

    def _add_pairs(self) -> None:
        """Add the layers that two ranges bound, on the thread of both, and name what runs inside them."""
        sides = np.array([("", *PAIR).index(meaning.pair) for meaning in self._meanings], dtype=np.int64)[self._meaning]
        rows = np.flatnonzero(sides)
        if not len(rows):
            return
        start, end, pid, tid = (self._columns[name] for name in ("start_ns", "end_ns", "pid", "tid"))
        rows = rows[np.lexsort((start[rows], tid[rows]))]
        bounds: list[tuple[int, int, int, int, str]] = []
        open_rows: dict[tuple[int, str], int] = {}
        for row in rows.tolist():
            meaning = self._meanings[self._meaning[row]]
            key = (int(tid[row]), meaning.name.text)
            if meaning.pair == PAIR[0]:
                open_rows[key] = row
                continue
            first = open_rows.pop(key, None)
            if first is None:  # begun before the window
                self._cut_pairs.append(meaning.name.text)
            start_ns = start[first] if first is not None else start[tid == tid[row]].min()
            bounds.append((int(start_ns), int(end[row]), int(pid[row]), int(tid[row]), meaning.name.text))
        for (thread, text), row in open_rows.items():  # not ended in the window
            self._cut_pairs.append(text)
            bounds.append((int(start[row]), int(end[tid == thread].max()), int(pid[row]), thread, text))
        texts = sorted({bound[4] for bound in bounds})
        columns = {
            name: np.array([bound[column] for bound in bounds], dtype=np.int64)
            for column, name in enumerate(("start_ns", "end_ns", "pid", "tid"))
        }
        first_pair = len(self._name)
        name = np.array([texts.index(bound[4]) for bound in bounds], dtype=np.int64)
        self._append(columns, [RangeName(text, Category.FORWARD) for text in texts], name)
        parent = self._nesting().parent
        for row in np.flatnonzero(parent[:first_pair] >= first_pair).tolist():
            meaning = self._meanings[self._meaning[row]]
            is_operator = meaning.operator == OPERATORS[0]
            part_name = meaning.part or (meaning.name.text.rpartition("::")[2] if is_operator else "")
            if part_name:
                path = f"{self._names[self._name[parent[row]]].text}.{part_name}"
                self._names.append(RangeName(path, Category.FORWARD))
                self._name[row] = len(self._names) - 1

    def operators(self) -> Operators:
        """The operators among the ranges, according to the rules."""
        forward, engine, node = (
            _flags(self._meanings, lambda one, kind=kind: one.operator == kind) for kind in OPERATORS
        )
        sequence = np.array([candidate.sequence for candidate in self._meanings], dtype=np.int64)
        rows = np.flatnonzero((forward | engine | node)[self._meaning])
        meaning = self._meaning[rows]
        start, end, pid, tid = (self._columns[name][rows] for name in ("start_ns", "end_ns", "pid", "tid"))
        return Operators(
            start, end, pid, tid, ~forward[meaning], engine[meaning], sequence[meaning], np.full(len(rows), NONE)
        )

    def add_operators(self, recorded: Any) -> None:
        """Treat forward operators as layers."""
        if recorded is None:
            numbered = _flags(self._meanings, lambda one: one.operator == OPERATORS[0] and one.sequence >= 0)
            self._name[numbered[self._meaning]] += len(self._names)
            self._names = [*self._names, *(RangeName(name.text, Category.FORWARD) for name in self._names)]
            return
        forward = recorded[~recorded["backward"]]
        names = forward["name"].cat
        self._append(
            {name: forward[name].to_numpy() for name in ("start_ns", "end_ns", "pid", "tid")},
            [RangeName(str(text), Category.FORWARD) for text in names.categories],
            names.codes.to_numpy().astype(np.int64),
        )

    def link(self, operators: Operators) -> list[Issue]:
        """Add the backward pass derived from the operators, and report how much of it was found."""
        nesting = self._nesting()
        layer_range = links.nearest(self.is_a(_FORWARD), nesting)
        operators = links.whole_nodes(operators)
        made_by = links.makers(operators)
        linked = links.layer_of_nodes(operators, made_by, nesting, layer_range)
        owner = links.with_followers(operators, linked)
        envelopes = links.envelopes(operators, owner, outer_layers(layer_range, nesting))
        texts = [RangeName(name.text, Category.BACKWARD) for name in self._names]
        self._append(
            {"start_ns": envelopes.start, "end_ns": envelopes.end, "pid": envelopes.pid, "tid": envelopes.tid},
            texts,
            self._name[envelopes.layer_range],
        )
        loose = operators.take(np.flatnonzero(operators.backward & (owner == NONE)))
        self._append(
            {"start_ns": loose.start, "end_ns": loose.end, "pid": loose.pid, "tid": loose.tid},
            [RangeName("backward", Category.PHASE)],
            np.zeros(len(loose), dtype=np.int64),
        )
        numbered = operators.backward & (operators.sequence >= 0)
        nodes, paired, in_layers = (
            int(np.count_nonzero(numbered & selected)) for selected in (True, made_by != NONE, linked != NONE)
        )
        if not nodes:
            return []
        text = (
            f"layers of the backward pass are found by sequence numbers: of {nodes} backward operators {paired} "
            f"({paired / nodes:.0%}) found the operator that made them, "
            f"{in_layers} ({in_layers / nodes:.0%}) in a layer"
        )
        if paired == nodes:
            return [Issue("sequence-numbers", "note", 1.0, text)]
        text += "; the others ran forward outside the window, or on one of several threads: begin it at a step"
        return [Issue("sequence-numbers", "warning", 1 - paired / nodes, text)]

    def frame(self) -> Any:
        """The translated ranges as a table with the standard schema."""
        return make_frame(
            "ranges",
            {
                **self._columns,
                "category": labels(self._name, [name.category.value for name in self._names]),
                "text": labels(self._name, [name.text for name in self._names]),
            },
        )

    def _nesting(self) -> Nesting:
        return nest(*(self._columns[name] for name in ("start_ns", "end_ns", "tid")))

    def _continue_paths(self) -> None:
        """Prepend the enclosing layer's path to each path that begins with a dot, from the outside in."""
        nesting = self._nesting()
        layer_range = links.nearest(self.is_a(_FORWARD + _BACKWARD), nesting)
        enclosing = outer_layers(layer_range, nesting)[: len(self._name)]
        relative = _flags(self._names, lambda name: name.text.startswith("."))[self._name]
        joined: dict[tuple[int, int], int] = {}
        for level in range(int(nesting.depth.max(initial=0)) + 1):
            here = np.flatnonzero(relative & (nesting.depth == level))
            outer = np.where(enclosing[here] == NONE, NONE, self._name[enclosing[here]])
            pairs, pair_index = np.unique(np.stack([outer, self._name[here]]), axis=1, return_inverse=True)
            numbers: list[int] = []
            for path, inner in pairs.T.tolist():
                if (path, inner) not in joined:
                    before = self._names[path].text if path != NONE else ""
                    joined[path, inner] = len(self._names)
                    self._names.append(self._names[inner]._replace(text=(before + self._names[inner].text).strip(".")))
                numbers.append(joined[path, inner])
            self._name[here] = np.array(numbers, dtype=np.int64)[pair_index.ravel()]

    def _append(self, columns: dict[str, Int64Array], names: list[RangeName], name: Int64Array) -> None:
        count = len(name)
        added = {
            **columns,
            "nested": np.ones(count, dtype=bool),
            "left_open": np.zeros(count, dtype=bool),
            "payload": np.full(count, MISSING_PAYLOAD, dtype=np.int64),
        }
        self._columns = {key: np.concatenate([values, added[key]]) for key, values in self._columns.items()}
        self._name = np.concatenate([self._name, name + len(self._names)])
        self._names = [*self._names, *names]


def _meanings(frame: Any, rules: Rules | None) -> tuple[list[Meaning], npt.NDArray[np.intp]]:
    """The meanings of the distinct (text, category) pairs, and the index of each range into them."""
    text, category = frame["text"].cat, frame["category"].cat
    texts, categories = text.categories.tolist(), category.categories.tolist()
    width = max(len(categories), 1)
    both = text.codes.to_numpy().astype(np.int64) * width + category.codes.to_numpy()
    distinct, pair_index = np.unique(both, return_inverse=True)
    ours = rules or Rules("nvprof_kit", otherwise="layer")
    meant = [ours.meaning(texts[code // width], categories[code % width] or None) for code in distinct.tolist()]
    return meant, pair_index


def _flags(names: list[Any], test: Any) -> npt.NDArray[np.bool_]:
    return np.array([test(name) for name in names], dtype=bool)
