"""The tree of counted layers and phases, and the least memory traffic of each call of a layer.

A perfect fusion of a layer keeps what it makes and uses itself out of memory: what it makes in its forward for its own
backward too, which could be computed again. So its traffic is what it reads of others (parameters, inputs) and what
others read of it, each storage once, and what it changes in place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nvprof_kit._instrument.flops.traffic import Accesses, Run, Storage, Views
from nvprof_kit.names import NO_LAYER


@dataclass(eq=False)
class Region:
    """A layer or phase in the tree of ranges, with the operators that ran directly in it.

    Attributes:
        layer: Path of the layer, or `NO_LAYER`.
        phase: Phase of the layer; outside layers, the text of the phase range or `NO_PHASE`.
        outer: The enclosing region; None at the top.
        calls: Number of times its range was opened.
        fused_bytes: Least memory traffic of its calls, with what ran in the layers inside it.
        work: The runs of operators of known work, and their memory traffic.
        unknown: Runs of operators without a known FLOP count.
        inside: The nested regions by layer and phase.
    """

    layer: str
    phase: str
    outer: Region | None = None
    calls: int = 0
    fused_bytes: int = 0
    work: list[Run] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    inside: dict[tuple[str, str], Region] = field(default_factory=dict)


@dataclass(eq=False)
class _Contents:
    """What is in a storage: the calls that it was allocated in, by layer."""

    length: int
    creators: dict[str, Call] = field(default_factory=dict)


class Call:
    """A call of a layer, or a range of a phase outside layers.

    Attributes:
        region: What was called.
        around: The calls that it is part of in the same phase, by layer, itself first.
    """

    def __init__(self, region: Region, outer: Call | None = None) -> None:
        self.region = region
        self.around = {self._name: self}
        if outer is not None and outer.region.phase == region.phase:
            self.around = {**self.around, **outer.around}
        self._views: dict[tuple[_Contents, bool], Views] = {}

    @property
    def _name(self) -> str:
        return self.region.layer if self.region.layer != NO_LAYER else f"{NO_LAYER} {self.region.phase}"

    def add(self, contents: _Contents, views: Views, *, written: bool) -> None:
        """Count these views of a storage once, never more than the whole storage."""
        seen = self._views.setdefault((contents, written), {})
        before = sum(seen.values())
        seen.update(views)
        self.region.fused_bytes += min(sum(seen.values()), contents.length) - min(before, contents.length)


class Fused:
    """Follows which calls allocate, read and change each storage, and adds up their traffic in their regions."""

    def __init__(self) -> None:
        self._storages: dict[int, _Contents] = {}

    def add(self, call: Call, accesses: Accesses) -> None:
        """An operator has run in a call."""
        for storage, views in accesses.reads.items():
            contents = self._contents(storage)
            for name, part_of in call.around.items():
                if not _is_own(contents.creators.get(name), part_of):
                    part_of.add(contents, views, written=False)
            for name, creator in contents.creators.items():
                if not _is_own(creator, call.around.get(name)):
                    creator.add(contents, views, written=True)
        for start, length in accesses.created:
            self._storages[start] = _Contents(length, dict(call.around))
        for storage, views in accesses.writes.items():
            contents = self._contents(storage)
            for name, part_of in call.around.items():
                if not _is_own(contents.creators.get(name), part_of):
                    part_of.add(contents, views, written=True)

    def _contents(self, storage: Storage) -> _Contents:
        start, length = storage
        contents = self._storages.get(start)
        if contents is None or contents.length != length:
            contents = self._storages[start] = _Contents(length)
        return contents


def _is_own(creator: Call | None, call: Call | None) -> bool:
    """Whether a call uses what it allocated, or what the same layer did in another phase."""
    return creator is call or (creator is not None and call is not None and creator.region.phase != call.region.phase)
