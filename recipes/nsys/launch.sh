#!/usr/bin/env bash
# Run a program in an nsys session that captures nothing yet; start.sh and stop.sh capture stretches of it:
#   SESSION=serving launch.sh python serve.py
# PRESET is that of start.sh, NSYS another nsys. `nsys sessions list` shows the sessions of this machine.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
mapfile -t options < <("$here/preset.sh" launch "${PRESET:-train}")
export NVPROF_KIT_RANK_MARK=step
exec "${NSYS:-nsys}" launch --session-new="${SESSION:-nvprof_kit}" "${options[@]}" "$@"
