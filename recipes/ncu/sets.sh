#!/usr/bin/env bash
# Print the options of ncu for sets, files of sets/ or others of their form, one a line: sets.sh speed-of-light ./mine.txt
# Not what is for other architectures than the first GPU's, or ARCH, nor what the installed ncu does not know.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
case ${ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1)} in
  sm_80 | 8.[0-8]) arch=sm_80 chip=ga100 ;;
  sm_89 | 8.9) arch=sm_89 chip=ad102 ;;
  sm_100 | 1[01].*) arch=sm_100 chip=gb100 ;;
  sm_120 | 12.*) arch=sm_120 chip=gb202 ;;
  *) arch=sm_90 chip=gh100 ;;
esac
for name in base "$@"; do case $name in */*) cat -- "$name" ;; *) cat -- "$here/sets/$name.txt" ;; esac; echo; done |
  awk -v arch="$arch" 'NR == FNR { has[$1]; next }
    { sub(/(^|[ \t])#.*|\r$/, ""); short = $2; sub(/[.].*/, "", short); fits = NF < 3 || index($0 " ", " " arch " ") }
    $1 == "section" && fits && ($2 in has || !("LaunchStats" in has)) && !seen[$2]++ { print "--section=" $2 }
    $1 != "metric" || !fits || ("gpu__time_duration" in has && !(short in has || $2 in has || /launch__/)) { next }
    !seen[$2]++ { metrics = metrics "," $2 } END { print "--metrics=" substr(metrics, 2) }
  ' <({ echo; "${NCU:-ncu}" --list-sections; "${NCU:-ncu}" --query-metrics --chip "$chip"; } 2>/dev/null) -
