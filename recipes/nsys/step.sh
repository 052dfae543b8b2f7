#!/usr/bin/env bash
# Profile one step of a program, the range of nvprof_kit.step(STEP), or with RANGE=TEXT@DOMAIN the first range of a text:
#   STEP=12 step.sh python train.py
#   RANGE='layers.0 backward@nvprof_kit' step.sh python train.py
# PRESET, OUTPUT and NSYS are those of profile.sh.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
mapfile -t options < <("$here/preset.sh" profile "${PRESET:-train}")
export NVPROF_KIT_RANK_MARK=step # the program says at each step, not at its begin alone, which rank it is
exec "${NSYS:-nsys}" profile "${options[@]}" --export=sqlite --output="${OUTPUT:-run}" \
  --capture-range=nvtx --nvtx-capture="${RANGE:-step ${STEP:?}@nvprof_kit}" --capture-range-end=stop "$@"
