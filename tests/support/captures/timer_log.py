"""Logs of `global_timer`."""

from pathlib import Path


def write(folder: Path, rank: int, *stages: tuple[str, float, float, float | None]) -> None:
    """Write a rank's log: of each stage its name, start and length in ms, and GPU time in ms, if it is known."""
    lines = [
        f"[RANK {rank}] {name}, start={1700000000 + start / 1e3:.6f}, end={1700000000 + (start + length) / 1e3:.6f}, "
        f"cpu_dur={length / 1e3:.6f}s, cuda_dur={'nan' if gpu is None else f'{gpu:.3f}'}ms\n"
        for name, start, length, gpu in stages
    ]
    (folder / f"timer_rank{rank}.log").write_text("".join(lines))
