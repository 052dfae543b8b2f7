"""Parse the cell with a thread's NVTX ranges in ncu's CSV.

``557  "nvprof_kit:step 0:Int64:0:RGB:0xff:REGISTERED:step 0"  "…" ``: the thread, then its ranges, outermost first in
each domain. The fields of a range are domain, name, payload type and value, color type and value, message type and
message. Nothing is escaped, so colons and quotes can appear anywhere; but the message repeats the name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

DEFAULT_DOMAIN = "<default domain>"
"""ncu's name for the default domain."""

_BETWEEN = re.compile(r'"\s+"')
_THREAD = re.compile(r"\s*(\d+)?\s*")
_PAYLOAD_AND_COLOUR = re.compile(
    r"(?:Int64|Uint64|Int32|Uint32|Double|Float|Json|none):.*:(?:\w+):(?:0x[0-9a-fA-F]+|none)", re.DOTALL
)
_MESSAGE = re.compile(r":(?:ASCII|REGISTERED|UNICODE|none):")


class NvtxState(NamedTuple):
    """The ranges open on the thread that launched a kernel.

    Attributes:
        tid: The thread; -1 if the cell is empty.
        ranges: (domain, name) pairs, outermost first in each domain. '' is the default domain.
    """

    tid: int
    ranges: tuple[tuple[str, str], ...]

    def of_domain(self, domain: str) -> tuple[str, ...]:
        """The names of one domain's ranges, outermost first."""
        return tuple(name for its, name in self.ranges if its == domain)


def parse_cell(cell: str) -> NvtxState:
    """The thread and the ranges of a push/pop cell, with CSV quotes already unescaped."""
    thread = _THREAD.match(cell)
    body = cell[thread.end() if thread else 0 :].strip()
    tid = int(thread[1]) if thread and thread[1] else -1
    if len(body) < 2:
        return NvtxState(tid, ())
    entries = _BETWEEN.split(body.removeprefix('"').removesuffix('"'))
    return NvtxState(tid, tuple(_parse_range(entry) for entry in entries))


def _parse_range(entry: str) -> tuple[str, str]:
    """Domain and name of one range."""
    for message in _MESSAGE.finditer(entry):
        text = entry[message.end() :]
        domain = _before(entry[: message.start()], text)
        if text and domain is not None:
            return _plain(domain), text
    return _by_position(entry)


def _before(text: str, name: str) -> str | None:
    """The domain before a name that is followed by payload and color; None if no such name is found."""
    sought = f":{name}:"
    for match in re.finditer(f"(?={re.escape(sought)})", text):  # lookahead, because matches can overlap
        if _PAYLOAD_AND_COLOUR.fullmatch(text[match.start() + len(sought) :]):
            return text[: match.start()]
    return None


def _by_position(entry: str) -> tuple[str, str]:
    """If no message repeats the name: drop the last six fields; the domain ends at the first colon."""
    named = entry.rsplit(":", 6)[0] if entry.count(":") >= 7 else entry
    domain, _, name = named.partition(":")
    return _plain(domain), name


def _plain(domain: str) -> str:
    return "" if domain == DEFAULT_DOMAIN else domain
