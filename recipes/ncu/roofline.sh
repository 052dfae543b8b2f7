#!/usr/bin/env bash
# Measure operations, bytes and the peaks of the GPU, of every launch, into roofline.ncu-rep:
#   roofline.sh --profile-from-start=off python train.py
# One layer: add --nvtx-include=nvprof_kit@model.layers.3/ there. OUTPUT is the report's name, NCU another ncu.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
printed=$("$here/sets.sh" roofline)
mapfile -t options <<<"$printed"
exec env LC_ALL=C "${NCU:-ncu}" --target-processes all --nvtx --clock-control=none "${options[@]}" \
  --export="${OUTPUT:-roofline}" "$@"
