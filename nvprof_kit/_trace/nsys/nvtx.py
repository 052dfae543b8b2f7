"""NVTX in an nsys export: domains, ranges and marks, from one read of ``NVTX_EVENTS``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.files.database import Database, among
from nvprof_kit._trace.frames import MISSING_PAYLOAD, labels
from nvprof_kit._trace.joins import distinct, distinct_rows
from nvprof_kit._trace.nsys.sources import (
    EVENT_TYPES,
    NAMES,
    RUNTIME,
    Columns,
    defined,
    process_of,
    read_columns,
    strings_of,
)
from nvprof_kit._trace.reader import named_domains

NESTED, START_END = (59, 70), (60, 71)
MARK, _CATEGORY, _DOMAIN_CREATE = 34, 33, 75
_DEFAULT_DOMAIN = 0
_OPEN = (0, -1, MISSING_PAYLOAD)
"""What exporters write as the end of a range that was still open."""
_PAYLOADS = ("uint64Value", "int64Value", "uint32Value", "int32Value")


@dataclass(frozen=True)
class Nvtx:
    """The NVTX events of a capture; a domain id and a category id are only valid within their process.

    Attributes:
        events: Columns ``start``, ``end``, ``kind``, ``tid``, ``pid``, ``end_tid``, ``domain``, ``category``, ``text``,
            ``text_id``, ``payload``; `MISSING_PAYLOAD` means a missing number.
        domains: The names of the registered domains by process and id.
        categories: The names of the categories by process, domain and id.
    """

    events: Columns
    domains: Mapping[tuple[int, int], str]
    categories: Mapping[tuple[int, int, int], str]

    @property
    def domain_names(self) -> list[str]:
        """The names of the registered domains, sorted."""
        return sorted({*self.domains.values()})

    def pairs(self, domain: str) -> set[tuple[int, int]]:
        """The processes and ids of a domain, or of several separated by commas, but for the default domain."""
        names = named_domains(domain, self.domain_names)
        return {pair for pair, name in self.domains.items() if name in names}

    def of_domain(self, domain: str) -> npt.NDArray[np.bool_]:
        """Which events are of a domain, or of several separated by commas."""
        ids = self.events["domain"]
        chosen = (ids == _DEFAULT_DOMAIN) & ("" in named_domains(domain, self.domain_names))
        for process, id_ in self.pairs(domain):
            chosen |= (self.events["pid"] == process) & (ids == id_)
        return np.asarray(chosen, dtype=bool)

    def has_ranges(self, domain: str) -> bool:
        """Whether there are ranges of a domain."""
        return bool((self.of_domain(domain) & among(self.events["kind"], NESTED + START_END)).any())

    def has_categories(self, domain: str) -> bool:
        """Whether a program registered categories in a domain."""
        pairs, has_default = self.pairs(domain), "" in named_domains(domain, self.domain_names)
        return any((pid, id_) in pairs or (has_default and not id_) for pid, id_, _ in self.categories)

    def handed_over(self, domain: str) -> int:
        """Number of ranges of a domain that end on a different thread."""
        end_tid = self.events["end_tid"]
        is_other = (end_tid != self.events["tid"]) & (end_tid != MISSING_PAYLOAD)
        return int((is_other & among(self.events["kind"], START_END) & self.of_domain(domain)).sum())


def read_nvtx(db: Database) -> Nvtx:
    """The NVTX events of a capture.

    Raises:
        CaptureError: A required value is missing, or a domain or category is registered without id or name.
    """
    payloads = {name: name for name in _PAYLOADS}
    events = read_columns(db, "NVTX_EVENTS", NAMES["nvtx"] | payloads, missing=MISSING_PAYLOAD)
    payload = np.full(len(events["start"]), MISSING_PAYLOAD, dtype=np.int64)
    for name in _PAYLOADS:  # the first with a value counts
        payload = np.where(payload == MISSING_PAYLOAD, events.pop(name), payload)
    events["payload"] = payload
    events["pid"] = process_of(events["tid"])
    names: dict[tuple[int, int], str] = {}
    categories: dict[tuple[int, int, int], str] = {}
    for row in np.flatnonzero(among(events["kind"], (_CATEGORY, _DOMAIN_CREATE))).tolist():
        domain, category, pid = (int(events[name][row]) for name in ("domain", "category", "pid"))
        text = db.strings.get(int(events["text_id"][row]), events["text"][row])
        noun = "domain" if events["kind"][row] == _DOMAIN_CREATE else "category"
        # without id or name its ranges would be assigned to another one
        for column, is_missing in (
            ("domainId is None", domain == MISSING_PAYLOAD),
            ("category is None", noun == "category" and category == MISSING_PAYLOAD),
            ("text and textId give no name", not text),
        ):
            if is_missing:
                raise db.refuse(f"NVTX_EVENTS.{column} where a {noun} is registered")
        if events["tid"][row] == MISSING_PAYLOAD:
            continue
        if noun == "domain":
            names[pid, domain] = text
        else:
            categories[pid, domain, category] = text
    events["domain"] = np.where(events["domain"] == MISSING_PAYLOAD, _DEFAULT_DOMAIN, events["domain"])
    return Nvtx(events, names, categories)


def events_of(db: Database, nvtx: Nvtx, domain: str, kinds: tuple[int, ...]) -> Columns:
    """Events of these kinds of one domain, or several separated by commas: start, end, kind, pid, tid, category, text
    and payload. Events of unknown types and domains cause a warning.
    """
    events, in_domain = nvtx.events, nvtx.of_domain(domain)
    is_kind = among(events["kind"], kinds)
    warn_of_unread(db, nvtx, domain, in_domain, is_kind)
    in_domain &= is_kind
    selected = events if in_domain.all() else {name: values[in_domain] for name, values in events.items()}
    ids, index = distinct(selected["text_id"])
    strings, has_no_id = strings_of(db, ids), selected["text_id"] < 0
    texts = [strings.get(id_, "") for id_ in ids.tolist()]
    if has_no_id.any():  # its text is in the row itself
        import pandas as pd

        text = pd.Categorical(np.where(has_no_id, selected["text"], np.array(texts, dtype=object)[index]))
    else:
        text = labels(index, texts)
    columns, index = distinct_rows(selected["pid"], selected["domain"], selected["category"])
    keys = zip(*(column.tolist() for column in columns), strict=True)
    return {
        **{name: selected[name] for name in ("start", "end", "kind", "pid", "tid", "payload")},
        "category": labels(index, [nvtx.categories.get(key, "") for key in keys]),
        "text": text,
    }


def warn_of_unread(
    db: Database, nvtx: Nvtx, domain: str, in_domain: npt.NDArray[np.bool_], is_kind: npt.NDArray[np.bool_]
) -> None:
    """Warn about events of unknown types, and of domains that their process has not registered."""
    events = nvtx.events
    is_known = among(events["kind"], defined(db, EVENT_TYPES))
    if count := int((in_domain & ~is_kind & ~is_known).sum()):
        unknown = np.unique(events["kind"][in_domain & ~is_kind & ~is_known])[:5]
        db.warn("rows:event-type", count=count, types=", ".join(map(str, unknown)))
    other_ids = {_DEFAULT_DOMAIN, *(id_ for _, id_ in nvtx.domains)} - {id_ for _, id_ in nvtx.pairs(domain)}
    rows = np.flatnonzero(~in_domain & (is_kind | ~is_known) & ~among(events["domain"], other_ids))
    (pids, ids), index = distinct_rows(events["pid"][rows], events["domain"][rows])
    is_unregistered = [pair not in nvtx.domains for pair in zip(pids.tolist(), ids.tolist(), strict=True)]
    if count := int(np.array(is_unregistered, dtype=bool)[index].sum()):
        db.warn("rows:unregistered-domain", count=count)


def ranges_of(db: Database, nvtx: Nvtx, domain: str) -> Columns:
    """Columns of the schema's ``ranges`` for one domain, or several separated by commas. A range without an end is
    open; exporters before 2022 wrote 0 for it.
    """
    read = events_of(db, nvtx, domain, NESTED + START_END)
    return {
        "start_ns": read["start"],
        "end_ns": read["end"].copy(),
        "nested": among(read["kind"], NESTED),
        "left_open": (read["end"] < read["start"]) & np.isin(read["end"], _OPEN),
        **{name: read[name] for name in ("pid", "tid", "category", "text", "payload")},
    }


def close_open_ranges(db: Database, ranges: Columns, ops: Columns) -> None:
    """Close open ranges at the end of the capture, the last timestamp in it."""
    if ranges["left_open"].any():
        returned = read_columns(db, RUNTIME, {"end": "end"}, missing=MISSING_PAYLOAD)["end"]
        times = (ranges["end_ns"], ranges["start_ns"], ops["end_ns"], returned)
        ranges["end_ns"][ranges["left_open"]] = max(int(values.max()) for values in times if len(values))


def marks_of(db: Database, nvtx: Nvtx, domain: str) -> Columns:
    """Columns of the schema's ``marks`` for one domain, or several separated by commas."""
    read = events_of(db, nvtx, domain, (MARK,))
    return {"time_ns": read["start"], **{name: read[name] for name in ("pid", "tid", "category", "text", "payload")}}
