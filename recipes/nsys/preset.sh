#!/usr/bin/env bash
# Print the options of a preset that a verb of the installed nsys has, one a line: preset.sh profile train
set -euo pipefail
preset=${2:-train}
case $preset in */*) ;; *) preset=$(dirname -- "$(readlink -f -- "$0")")/presets/$preset ;; esac
has=$("${NSYS:-nsys}" "$1" --help 2>&1 | grep -v '(Deprecated)')
while read -r option; do
  name=${option%%=*}
  case $has in
    *"$name="*) echo "$option" ;;
    *"${name%s}="*) echo "${name%s}=${option#*=}" ;; # --gpu-metrics-devices was --gpu-metrics-device
  esac
done < <(grep '^--' "$preset")
