#!/usr/bin/env bash
# Profile windows of a program's loop inside nvprof_kit.record(schedule=None):
#   SCHEDULE=50:60 schedule.sh python train.py
#   SCHEDULE=stable WINDOWS=2 schedule.sh python train.py
# Each of several windows has its report: run.1, run.2, ... PRESET, OUTPUT and NSYS are those of profile.sh.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
mapfile -t options < <("$here/preset.sh" profile "${PRESET:-train}")
export NVPROF_KIT_SCHEDULE=${SCHEDULE:?} NVPROF_KIT_RANK_MARK=step
end=stop
[ "${WINDOWS:-1}" = 1 ] || end=repeat:$WINDOWS
exec "${NSYS:-nsys}" profile "${options[@]}" --export=sqlite --output="${OUTPUT:-run}" \
  --capture-range=nvtx --nvtx-capture=window@nvprof_kit --capture-range-end="$end" "$@"
