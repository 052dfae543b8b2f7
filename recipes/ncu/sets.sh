#!/usr/bin/env bash
# Print the options of ncu for sets, files of sets/ or others of their form, one a line: sets.sh speed-of-light ./mine.txt
# Not what is for other architectures than the first GPU's, or ARCH. What the installed ncu does not know is left out with a note.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")") gpu=${CUDA_VISIBLE_DEVICES-} gpu=${gpu%%,*}
case ${ARCH:-$(nvidia-smi ${gpu:+--id="$gpu"} --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1)} in
  sm_80 | 8.[0-8]) arch=sm_80 chip=ga100 ;;
  sm_89 | 8.9) arch=sm_89 chip=ad102 ;; # tensor cores for fp8, no NVLink
  sm_100 | 1[01].*) arch=sm_100 chip=gb100 ;;
  sm_120 | 12.*) arch=sm_120 chip=gb202 ;; # no tcgen05, whose pipes sm_100 counts by names of their own
  *) arch=sm_90 chip=gh100 ;;
esac
for name in base "$@"; do case $name in */*) cat -- "$name" ;; *) cat -- "$here/sets/$name.txt" ;; esac; echo; done |
  awk -v arch="$arch" 'function say(text) { print "sets.sh: " text >"/dev/stderr" } NR == FNR { has[$1]; next }
    { sub(/(^|[ \t])#.*|\r$/, ""); short = $2; sub(/[.].*/, "", short); fits = NF && (NF < 3 || index($0 " ", " " arch " ")) }
    NF && !/^[ \t]*(section|metric)[ \t]+[^ \t]+([ \t]+sm_(80|89|90|100|120))*[ \t]*$/ { say($0 ": no section NAME or metric NAME"); exit bad = 2 }
    !fits || seen[$1, $2]++ { next } /launch__/ { has[$2] } # a metric of the launch, which ncu does not list
    ($1 == "section" ? "LaunchStats" : "gpu__time_duration") in has && !(short in has || $2 in has) { say("this ncu has no " $1 " " $2 " on " arch ": left out"); next }
    $1 == "section" { print "--section=" $2; next } { metrics = metrics "," $2 } END { if (!bad) print "--metrics=" substr(metrics, 2) }
  ' <({ echo; "${NCU:-ncu}" --list-sections; "${NCU:-ncu}" --query-metrics --chip "$chip"; } 2>/dev/null) -
