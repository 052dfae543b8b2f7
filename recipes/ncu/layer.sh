#!/usr/bin/env bash
# Measure the kernels that one layer launches, with everything nested in it, into layer.ncu-rep:
#   LAYER=model.layers.3 layer.sh python train.py
#   LAYER='model.layers.3 backward' SETS='tensor memory' layer.sh --profile-from-start=off python train.py
# LAYER is the text of a range in the domain nvprof_kit, with \ before any of ][@,/*+; SETS are files of sets/, OUTPUT the
# report's name, NCU another ncu. Options of ncu come before the program.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
read -ra sets <<<"${SETS:-speed-of-light memory tensor occupancy stalls}"
printed=$("$here/sets.sh" "${sets[@]}")
mapfile -t options <<<"$printed"
exec env LC_ALL=C "${NCU:-ncu}" --target-processes all --nvtx --clock-control=none --nvtx-include="nvprof_kit@${LAYER:?}/" \
  "${options[@]}" --export="${OUTPUT:-layer}" "$@"
