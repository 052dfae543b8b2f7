#!/usr/bin/env bash
# Between a launcher and its program, below `ncu profile --rank N` or a recipe with NVPROF_KIT_NCU_RANK=N: becomes the
# program, on all ranks but N out of ncu's sight, since ranks that wait for each other hang below one ncu:
#   nvprof-kit ncu profile -k nccl -s communication --rank 0 -- torchrun --no-python /path/to/rank.sh python train.py
set -euo pipefail
fail() { printf 'rank.sh: %s\n' "$2" >&2; exit "$1"; }
[ "${1-}" != -- ] || shift; [ $# -gt 0 ] || fail 2 "no program to run; needed: LAUNCHER... rank.sh python train.py"
[ -n "${NVPROF_KIT_NCU_RANK-}${NV_COMPUTE_PROFILER_PERFWORKS_DIR-}" ] || exec "$@"
[ -n "${NVPROF_KIT_NCU_RANK-}" ] || fail 2 "which rank to measure is not known; set NVPROF_KIT_NCU_RANK, or use --rank N"
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID-}}}}} # Slurm's last: a batch script has it too
[ -n "$rank" ] || fail 2 "no rank is known: none of RANK, OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK, SLURM_PROCID is set"
[ "$((10#$rank))" -ne "$NVPROF_KIT_NCU_RANK" ] || exec "$@"
unset NVTX_INJECTION{32,64}_PATH CUDA_INJECTION{32,64}_PATH # NVTX would load them, whatever ncu leaves out
folder=$(mktemp -d -- "${TMPDIR:-/tmp}/nvprof_kit.XXXXXXXX") ||
  fail 3 "cannot write to ${TMPDIR:-/tmp}; set TMPDIR to a folder that can be written"
shadow=$folder/other-rank # ncu leaves out what runs below an executable of this name
{ cp -- /bin/bash "$shadow" && "$shadow" -p -c :; } || { rm -rf -- "$folder"
  fail 3 "nothing can run in ${TMPDIR:-/tmp}; set TMPDIR to a folder with room, whose programs may run"; }
# shellcheck disable=SC2016  # for the other shell, which reads no BASH_ENV
exec "$shadow" -p -c 'rm -rf -- "${0%/*}"; exec -- "$@"' "$shadow" "$@"
