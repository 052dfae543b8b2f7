#!/usr/bin/env bash
# Profile a program from its start to its end, into run.nsys-rep and run.sqlite:
#   profile.sh python train.py
#   PRESET=infer OUTPUT=serving profile.sh --delay=60 --duration=20 python serve.py
# PRESET is a file of presets/ or the path of another, OUTPUT the report's name, NSYS another nsys. Options of nsys that the
# preset has not come before the program.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
mapfile -t options < <("$here/preset.sh" profile "${PRESET:-train}")
exec "${NSYS:-nsys}" profile "${options[@]}" --export=sqlite --output="${OUTPUT:-run}" "$@"
