#!/usr/bin/env bash
# Measure the first launches of the kernels whose names match a regular expression, into kernels.ncu-rep:
#   KERNEL=flash_fwd COUNT=3 kernels.sh python train.py
#   KERNEL=nccl SETS=communication NVPROF_KIT_NCU_RANK=0 kernels.sh --replay-mode=application \
#     torchrun --nproc-per-node 8 --no-python /path/to/rank.sh python train.py
# SETS are files of sets/, OUTPUT the report's name, NCU another ncu. Options of ncu come before the program.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
read -ra sets <<<"${SETS:-speed-of-light memory tensor occupancy stalls}"
printed=$("$here/sets.sh" "${sets[@]}")
mapfile -t options <<<"$printed"
[ -z "${NVPROF_KIT_NCU_RANK-}" ] || options+=(--target-processes-filter=exclude-tree:other-rank)
exec env LC_ALL=C "${NCU:-ncu}" --target-processes all --nvtx --clock-control=none --kernel-name="regex:${KERNEL:?}" \
  --launch-count="${COUNT:-10}" "${options[@]}" --export="${OUTPUT:-kernels}" "$@"
