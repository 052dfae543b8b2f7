"""Reference implementation of the per-layer table: plain SQL and Python, operation by operation.

It shares no code with the package: it asks the database for each operation which ranges held its launching call, and
sorts nothing into arrays. What it knows is the text of the contract.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PROCESS = ~0xFFFFFF
LAYER_PHASES = ("forward", "backward", "recompute")
PHASES = ("phase", "optimizer", "data")
STEPS = ("step",)


class Held(NamedTuple):
    """One range around a moment."""

    text: str
    category: str
    payload: int | None
    start: int
    end: int
    tid: int


def number_of(step: Held) -> int:
    """A step's number: its payload, else the last word of its text."""
    return step.payload if step.payload is not None else int(step.text.split()[-1])


def instances_of(steps: list[Held]) -> dict[Held, int]:
    """The instance of each step range: outermost ranges of a thread, by start and then by thread.

    One that begins while its number runs on other threads, and has not run on its own since that began, is the same
    instance.
    """
    outer = {
        step: min(
            (one for one in steps if one.tid == step.tid and one.start <= step.start and one.end >= step.end),
            key=lambda one: (one.start, -one.end),
        )
        for step in steps
    }
    runs: list[list[Held]] = []
    for top in sorted({outer[step] for step in steps}, key=lambda one: (one.start, one.tid)):
        latest = next((run for run in reversed(runs) if number_of(run[0]) == number_of(top)), None)
        fits = latest is not None and all(one.tid != top.tid for one in latest)
        if latest is not None and fits and top.start < max(one.end for one in latest):
            latest.append(top)
        else:
            runs.append([top])
    return {step: next(place for place, run in enumerate(runs) if top in run) for step, top in outer.items()}


class BruteForce:
    """The reference results of one capture."""

    def __init__(self, path: Path, domain: str = "nvprof_kit") -> None:
        self.db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self.db.execute("CREATE TEMP TABLE ours AS " + self._ranges_sql(), {"domain": domain})
        self.db.execute("CREATE INDEX temp.by_thread ON ours (globalTid, start)")
        steps = "SELECT text, category, payload, start, finish, globalTid FROM temp.ours WHERE category = 'step'"
        self.instances = instances_of([Held(*row) for row in self.db.execute(steps)])
        self.numbers = {place: number_of(step) for step, place in self.instances.items()}
        # a capture does not change: both tables ask for the same moments and the same operations
        self.around, self.elsewhere, self.operations = map(cache, (self.around, self.elsewhere, self.operations))

    def _ranges_sql(self) -> str:
        return """
            SELECT n.start, n."end" AS finish, n.globalTid, n.globalTid & ~0xFFFFFF AS pid,
                   coalesce(s.value, n.text) AS text,
                   coalesce(n.uint64Value, n.int64Value, n.uint32Value, n.int32Value) AS payload,
                   (SELECT coalesce(cs.value, c.text)
                      FROM NVTX_EVENTS AS c LEFT JOIN StringIds AS cs ON cs.id = c.textId
                     WHERE c.eventType = 33 AND c.domainId = n.domainId AND c.category = n.category
                       AND c.globalTid & ~0xFFFFFF = n.globalTid & ~0xFFFFFF) AS category
              FROM NVTX_EVENTS AS n LEFT JOIN StringIds AS s ON s.id = n.textId
             WHERE n.eventType IN (59, 60)
               AND EXISTS (SELECT 1 FROM NVTX_EVENTS AS d LEFT JOIN StringIds AS ds ON ds.id = d.textId
                            WHERE d.eventType = 75 AND coalesce(ds.value, d.text) = :domain AND d.domainId = n.domainId
                              AND d.globalTid & ~0xFFFFFF = n.globalTid & ~0xFFFFFF)"""

    def has(self, table: str) -> bool:
        return bool(self.db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone())

    # ------------------------------------------------------------ ranges around a moment

    def around(self, tid: int, moment: int) -> list[Held]:
        """The ranges open on a thread at a moment, the innermost first."""
        found = self.db.execute(
            "SELECT text, category, payload, start, finish, globalTid FROM temp.ours"
            " WHERE globalTid = ? AND start <= ? AND finish > ?"
            " ORDER BY start DESC, finish ASC",
            (tid, moment, moment),
        )
        return [Held(*row) for row in found]

    def elsewhere(self, tid: int, moment: int, categories: tuple[str, ...]) -> Held | None:
        """The innermost range of some categories on the one other thread of the process that has one."""
        threads = defaultdict(list)
        for row in self.db.execute(
            "SELECT globalTid, text, category, payload, start, finish, globalTid FROM temp.ours"
            " WHERE pid = ? AND globalTid <> ? AND start <= ? AND finish > ? ORDER BY start DESC",
            (tid & PROCESS, tid, moment, moment),
        ):
            if row[2] not in categories:
                continue
            threads[row[0]].append(Held(*row[1:]))
        return next(iter(threads.values()))[0] if len(threads) == 1 else None

    @staticmethod
    def layer_of(held: Held, outer: list[Held]) -> tuple[str, str] | None:
        """(layer, phase) of a range; None if it is not a layer's."""
        if held.category not in LAYER_PHASES:
            return None
        phase = held.category
        if phase == "forward" and any(one.category == "backward" for one in outer):
            phase = "recompute"
        return held.text.removesuffix(f" {held.category}") if held.category != "forward" else held.text, phase

    def layers_of(self, stack: list[Held]) -> list[tuple[str, str]]:
        """The layers of a stack of ranges, innermost first."""
        return [found for i, held in enumerate(stack) if (found := self.layer_of(held, stack[i + 1 :]))]

    # ------------------------------------------------------------ operations

    def operations(self) -> list[dict[str, Any]]:
        found = []
        for table in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"):
            name = f"CUPTI_ACTIVITY_KIND_{table}"
            if self.has(name):
                node = "NULL" if table == "GRAPH_TRACE" else "graphNodeId"
                found += self.db.execute(
                    f'SELECT start, "end", deviceId, correlationId, globalPid, {node} FROM {name}'
                ).fetchall()
        return [self._operation(*row) for row in found]

    def _operation(self, start, end, device, correlation, pid, node):
        call = self.db.execute(
            "SELECT start, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME"
            " WHERE correlationId = ? AND globalTid & ~0xFFFFFF = ?",
            (correlation, pid),
        ).fetchall()
        assert len(call) == 1
        launch = call[0][1], call[0][0]
        created = self.created(node, pid) if node else None
        step = self.first(self.around(*launch), STEPS) or self.elsewhere(*launch, STEPS)
        layers: list[tuple[str, str]] = []
        phase, replay = None, None
        for moment in (created, launch):
            if moment is None:
                continue
            stack = self.around(*moment)
            layers = self.layers_of(stack)
            held = self.first(stack, PHASES) or self.elsewhere(*moment, PHASES)
            if layers or held:
                phase = layers[0][1] if layers else held.text if held else None
                replay = correlation if moment is created else None
                break
        step_instance, replayed = self.instances[step] if step else None, (pid, replay) if replay else None
        times = {"ns": end - start, "start": start, "end": end, "pid": pid, "device": device}
        return times | {"layers": layers, "phase": phase or "other", "step": step_instance, "replay": replayed}

    @staticmethod
    def first(stack: list[Held], categories: tuple[str, ...]) -> Held | None:
        return next((held for held in stack if held.category in categories), None)

    def created(self, node: int, pid: int) -> tuple[int, int] | None:
        table = "CUDA_GRAPH_NODE_EVENTS" if self.has("CUDA_GRAPH_NODE_EVENTS") else "CUDA_GRAPH_EVENTS"
        if not self.has(table):
            return None
        sql = f"SELECT originalGraphNodeId, globalTid, start FROM {table}"
        sql += " WHERE graphNodeId = ? AND globalTid & ~0xFFFFFF = ?"
        while True:
            rows = self.db.execute(sql, (node, pid)).fetchall()
            originals = {row[0] for row in rows if row[0] is not None}
            if not originals:
                return min((row[1:] for row in rows), key=lambda row: row[1], default=None)
            (node,) = originals

    # ------------------------------------------------------------ the table

    def table(
        self, by_step: bool = False, parent: Mapping[str, str] | None = None
    ) -> dict[tuple[Any, ...], dict[str, float]]:
        """Rows of the per-layer table by (layer, phase), or by (instance of a step, layer, phase).

        A row in which every number is 0 is not shown. Totals go by the model: an operation counts for its own layer and
        those that hold it, each in its phase.

        Args:
            by_step: Tell steps apart.
            parent: The layer that holds each layer in the model, '' at the top.
        """
        ran = self._layer_keys()
        zeros = dict.fromkeys(("calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "cpu_ns"), 0)
        rows: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(lambda: {**zeros, "busy": [], "replays": set()})
        operations = self.operations()
        for op in operations:
            layers = op["layers"] or [("(none)", op["phase"])]
            own = rows[((op["step"],) if by_step else ()) + layers[0]]
            own["gpu_ops"] += 1
            own["gpu_self_ns"] += op["ns"]
            for key in held_by(layers[0], parent or {}):
                row = rows[((op["step"],) if by_step else ()) + key]
                row["gpu_total_ns"] += op["ns"]
                row["busy"].append(((op["pid"], op["device"]), op["start"], op["end"]))
                if op["replay"] and op["layers"] and key in ran:
                    row["replays"].add(op["replay"])
        self._add_ranges(rows, by_step)
        total = sum(op["ns"] for op in operations) or 1
        return {
            key: {name: row[name] for name in zeros}
            | {"calls": row["calls"] + len(row["replays"]), "share": row["gpu_self_ns"] / total}
            | {"gpu_busy_ns": union(row["busy"])}
            for key, row in rows.items()
            if any(row[name] for name in ("calls", "gpu_ops", "gpu_total_ns", "cpu_ns", "replays"))
        }

    def _layer_keys(self) -> set[tuple[str, str]]:
        """The layers and phases with a range."""
        found = set()
        for row in self.db.execute(
            "SELECT text, category, payload, start, finish, globalTid FROM temp.ours"
        ).fetchall():
            me = Held(*row)
            key = self.layer_of(me, self._around_range(me))
            found |= {key} if key else set()
        return found

    def _around_range(self, me: Held) -> list[Held]:
        return [
            held
            for held in self.around(me.tid, me.start)
            if held.start < me.start or (held.start == me.start and held.end > me.end)
        ]

    def _add_ranges(self, rows: dict[tuple[Any, ...], dict[str, Any]], by_step: bool) -> None:
        phases = set()  # one phase inside another of the same text is not another call of it
        for text, category, payload, start, finish, tid in self.db.execute(
            "SELECT text, category, payload, start, finish, globalTid FROM temp.ours ORDER BY start"
        ).fetchall():
            me = Held(text, category, payload, start, finish, tid)
            outer = self._around_range(me)
            key = self.layer_of(me, outer) or (("(none)", text) if category in PHASES else None)
            if key is None:
                continue
            if key[0] == "(none)":
                again = (text, tid, start, finish) in phases
                phases.add((text, tid, start, finish))
                if again or any(held.category in PHASES and held.text == text for held in outer):
                    continue
            step = self.first(outer, STEPS) or self.elsewhere(tid, start, STEPS)
            rows[((self.instances[step] if step else None,) if by_step else ()) + key]["calls"] += 1
        changes = defaultdict(set)  # of each thread, where its ranges begin and end
        for tid, start, finish in self.db.execute("SELECT globalTid, start, finish FROM temp.ours").fetchall():
            changes[tid] |= {start, finish}
        for tid, moments in changes.items():
            for begin, end in pairwise(sorted(moments)):
                self._add_time(rows, by_step, tid, begin, end)

    def _add_time(self, rows, by_step: bool, tid: int, begin: int, end: int) -> None:
        """Add an interval's CPU time to the layers and phases open on the thread, once each."""
        stack = self.around(tid, begin)
        seen = set()
        for place in reversed(range(len(stack))):  # from the outside in
            held, outer = stack[place], stack[place + 1 :]
            key = self.layer_of(held, outer) or (("(none)", held.text) if held.category in PHASES else None)
            if key is None or key in seen:
                continue
            seen.add(key)
            step = self.first(outer, STEPS) or self.elsewhere(tid, held.start, STEPS)
            covered = self.in_layers(tid & PROCESS, begin, end) if key[0] == "(none)" else 0
            row = rows[((self.instances[step] if step else None,) if by_step else ()) + key]
            row["cpu_ns"] += end - begin - covered

    def in_layers(self, pid: int, begin: int, end: int) -> int:
        """How much of an interval the ranges of layers cover, on any thread of the process."""
        reach, covered = begin, 0
        for start, finish in self.db.execute(
            "SELECT start, finish FROM temp.ours WHERE pid = ? AND category IN ('forward', 'backward', 'recompute')"
            " AND start < ? AND finish > ? ORDER BY start",
            (pid, end, begin),
        ):
            covered += max(min(finish, end) - max(start, reach), 0)
            reach = max(reach, finish)
        return covered


def held_by(own: tuple[str, str], parent: Mapping[str, str]) -> set[tuple[str, str]]:
    """The rows that hold a layer's phase: its own, and those of the layers outwards, whether they ran in it or not."""
    layer, phase = own
    found = {own}
    while layer := parent.get(layer, ""):
        found |= {(layer, phase)}
    return found


def union(intervals: list[tuple[int, int, int]]) -> int:
    """Length of the union of (device, start, end), summed over devices."""
    length, reach = 0, {}
    for device, start, end in sorted(intervals):
        length += max(0, end - max(start, reach.get(device, start)))
        reach[device] = max(reach.get(device, end), end)
    return length
