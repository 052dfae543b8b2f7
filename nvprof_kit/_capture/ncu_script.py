"""The script that measures chosen kernels with ncu: plain bash that does not need this package."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SETS = ("basic", "detailed", "full", "source", "roofline", "nvlink", "pmsampling", "default")
"""ncu's sets of sections, 2020 to 2026 (`ncu --list-sets`)."""


@dataclass(frozen=True)
class NcuScript:
    """What a script measures, and how.

    Attributes:
        names: Linker names of the kernels.
        invocations: The launches to measure of each configuration, from 1.
        about: Description lines, added at the top as comments.
        section_set: ncu's section set.
        own_window: Measure only between the program's cudaProfilerStart and cudaProfilerStop calls, as in the capture.
        report: Name of the report, without suffix.
        rank: The measured rank of a multi-rank program; None for a single process.
    """

    names: Sequence[str]
    invocations: Sequence[int] = (1,)
    about: Sequence[str] = ()
    section_set: str = "basic"
    own_window: bool = False
    report: str = "plan"
    rank: int | None = None


def ncu_arguments(script: NcuScript) -> list[str]:
    """The arguments of ncu, without the kernel filter and the report."""
    return [
        *("--target-processes", "all", "--nvtx"),
        *("--set", script.section_set, "--replay-mode", "kernel"),
        *("--clock-control", "none", "--cache-control", "all"),
        *(("--profile-from-start", "off") if script.own_window else ()),
        *("--filter-mode", "per-launch-config", "--kernel-name-base", "mangled"),
    ]


def ncu_script(script: NcuScript) -> str:
    """The text of the script."""
    about = "".join(f"# {' '.join(line.split())}\n" for line in script.about)
    names = "".join(f"  {shlex.quote(re.escape(name))}\n" for name in script.names)
    numbers = "|".join(map(str, script.invocations))
    arguments = shlex.join(ncu_arguments(script))
    report = shlex.quote(script.report)
    rank = "" if script.rank is None else str(script.rank)
    return _TEXT.format(rank=rank, about=about, report=report, arguments=arguments, names=names, numbers=numbers)


_TEXT = """\
#!/usr/bin/env bash
{about}#   bash THIS_SCRIPT [-o NAME] [-f] [-n] [-x OPTION]... -- PROGRAM [ARGUMENT]...
# leaves NAME.ncu-rep and NAME.csv. -f overwrites them, -n prints the command, -x adds an option of ncu;
# NCU is the ncu to run. Exit status: the program's own; 2 for a wrong call, 3 where there is no ncu.
set -euo pipefail +o posix

# of each of these kernels in each grid, block and shared memory it comes with, the launches of these numbers
numbers='{numbers}'
kernels=(
{names})

fail() {{
  printf '%s: %s\\n' "${{0##*/}}" "$2" >&2
  exit "$1"
}}

report={report} rank='{rank}' force='' dry_run=''
extra=()
while [ $# -gt 0 ]; do
  case $1 in
    -o | -x)
      [ $# -ge 2 ] || fail 2 "$1 needs a value"
      if [ "$1" = -o ]; then report=${{2%.ncu-rep}}; else extra+=("$2"); fi
      shift ;;
    -f) force=yes ;;
    -n) dry_run=yes ;;
    --) shift; break ;;
    *) fail 2 "no option $1; the program comes after --" ;;
  esac
  shift
done
[ $# -gt 0 ] || fail 2 "no program to run; needed: ${{0##*/}} -- python train.py"

if [ -n "$rank" ] && [ -z "$dry_run" ]; then # every rank starts this script; only one of them is measured
  this=${{RANK:-${{OMPI_COMM_WORLD_RANK:-${{PMIX_RANK:-${{PMI_RANK:-${{SLURM_PROCID-}}}}}}}}}}
  [ -n "$this" ] ||
    fail 2 "no rank is known; start it with the launcher: torchrun --no-python bash $0 -- python train.py"
  [ "$this" = "$rank" ] || exec "$@"
fi

names=$(IFS='|'; printf '%s' "${{kernels[*]}}")
command=("${{NCU:-ncu}}" {arguments} --kernel-id "::regex:^($names)\\$:$numbers")
command+=(${{extra[@]+"${{extra[@]}}"}} --force-overwrite --export "$report.partial" "$@")
if [ -n "$dry_run" ]; then
  printf '%q ' env LC_ALL=C "${{command[@]}}"
  printf '\\n'
  exit 0
fi
command -v "${{NCU:-ncu}}" >/dev/null || fail 3 "no ncu; install Nsight Compute and put it on PATH, or set NCU"
[[ $("${{NCU:-ncu}}" --help 2>&1) == *per-launch-config* ]] || fail 3 "this ncu is too old; needed 2022.4 or newer"
for file in "$report.ncu-rep" "$report.csv"; do
  [ -n "$force" ] || [ ! -e "$file" ] || fail 2 "$file exists; choose another name with -o, or overwrite it with -f"
done
# only what is whole gets the report's name; a signal ends the program too
export LC_ALL=C
set -m
"${{command[@]}}" <&0 &
set +m
trap 'kill -TERM $! 2>/dev/null' INT TERM HUP
while kill -0 $! 2>/dev/null; do wait $! || :; done
status=0
wait $! || status=$?
[ -e "$report.partial.ncu-rep" ] || fail "$((status ? status : 1))" "ncu measured no kernel"
{{
  echo "==nvprof_kit== launches: $numbers"
  "${{NCU:-ncu}}" --import "$report.partial.ncu-rep" --page raw --csv --print-units base
}} > "$report.partial.csv"
mv -f -- "$report.partial.ncu-rep" "$report.ncu-rep"
mv -f -- "$report.partial.csv" "$report.csv"
exit "$status"
"""
