#!/usr/bin/env bash
@about@
#   bash THIS_SCRIPT -- PROGRAM [ARGUMENT]...   NCU is the ncu to run, 2022.4 or newer
# With NVPROF_KIT_NCU_RANK=N, below a launcher, rank N is measured and the others only run.
set -u
fail() { echo "${0##*/}: $2" >&2; exit "$1"; }
[ "${1-}" != -- ] || shift; [ $# -gt 0 ] || fail 2 "no program to run; needed: bash $0 -- python train.py"
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID-}}}}}
[ "$rank" = "${NVPROF_KIT_NCU_RANK-$rank}" ] || exec "$@"
[ ! -e @report@ ] || fail 2 "the report exists; remove it, or run this in another folder"
command -v "${NCU:-ncu}" >/dev/null || fail 3 "no ncu; install Nsight Compute and put it on PATH, or set NCU"
export LC_ALL=C; trap 'kill -TERM $! 2>/dev/null' INT TERM HUP; set -m
"${NCU:-ncu}" @ncu@ "$@" <&0 &
while kill -0 $! 2>/dev/null; do wait $!; done; wait $!; status=$?
[ -e @report@ ] || fail "$((status ? status : 1))" "ncu measured no kernel"
{ echo '==nvprof_kit== launches: @launches@'
  "${NCU:-ncu}" --import @report@ --page raw --csv --print-units base; } > @page@
exit "$status"
