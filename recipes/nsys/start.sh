#!/usr/bin/env bash
# Begin a capture in a session of launch.sh; it goes on until stop.sh:
#   SESSION=serving OUTPUT=first start.sh
# PRESET is that of launch.sh: nsys takes a part of the options at launch and the others here.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
mapfile -t options < <("$here/preset.sh" start "${PRESET:-train}")
exec "${NSYS:-nsys}" start --session="${SESSION:-nvprof_kit}" "${options[@]}" --export=sqlite --output="${OUTPUT:-run}" "$@"
