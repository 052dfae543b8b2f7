"""Tiny captures of a rank: two steps of one layer and an all-reduce."""

from pathlib import Path

from support.captures.nsys_file import MARK, NsysFile

MS = 1_000_000
AR = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def capture(
    folder: Path, rank: int, *, slower: int = 0, shift: int = 0, name: str = "", mark: str = "", layer: str = "layers.0"
) -> Path:
    """Two steps of one layer and an all-reduce; `slower` ns more in the layer, the clock `shift` ns ahead."""
    file = NsysFile(folder / (name or f"run.rank{rank}.sqlite"), nsys="2024.2")
    if mark:
        file.range_(mark, 10, None, category="user", style=MARK)
    for step in (0, 1):
        at = shift + step * 20 * MS
        file.range_(f"step {step}", at, at + 15 * MS, category="step", payload=step)
        file.range_(layer, at + 1 * MS, at + 2 * MS, category="forward")
        begin = at + 2 * MS
        file.kernel(begin, begin + 4 * MS + slower, launched=(at + 1_200_000, at + 1_210_000))
        # both end at 18 ms of the step on the true clock, whoever came last
        arrived = begin + 4 * MS + slower
        end = shift + step * 20 * MS + 18 * MS
        file.kernel(arrived, end, launched=(at + 2_100_000, at + 2_110_000), name=AR, stream=9)
    file.write()
    return file.path
