#!/usr/bin/env bash
# Measure the kernels of a name with ncu.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: kernels.sh -k NAME [OPTION]... -- PROGRAM [ARGUMENT]...

Measure the first launches of the kernels whose names match:

  kernels.sh -k flash_fwd --count 3 -- python train.py
  nvprof-kit ncu kernels kernels.csv

Those of NCCL, of one rank (see rank.sh --help):

  kernels.sh -k nccl -s communication --window --rank 0 -- \
    torchrun --nproc-per-node 8 --no-python /path/to/rank.sh python train.py

Options:
  -k, --kernel NAME   a regular expression for the function's name, without parameters; may be given again
      --each          the first launch of every grid, block and shared memory it comes with, instead of --count
HELP
  common_help
}

names=() each=''
option() { # NAME VALUE
  case $1 in
    kernel) [ -n "$2" ] || fail 2 "$given '' names no kernel"; names+=("$2") ;;
    each) each=yes ;;
    *) common_option "$@" ;;
  esac
}

take_options "$@"
refuse_ranges "ncu measures ranges, and no kernels by their names"
[ ${#names[@]} -gt 0 ] || fail 2 "no kernel; needed: kernels.sh -k NAME -- python train.py"
[ ${#sets[@]} -gt 0 ] || sets=(speed-of-light memory tensor occupancy stalls)
output=${output:-kernels}
joined=$(IFS='|' && printf '%s' "${names[*]}")
if [ -n "$each" ]; then
  case $joined in *:*) fail 2 "a name with a colon cannot be filtered by configuration: '$joined'" ;; esac
  need_filter_by_configuration
  measure --filter-mode=per-launch-config "--kernel-id=::regex:$joined:1" -- "${program[@]}"
else
  count=${count:-10}
  measure "--kernel-name=regex:$joined" -- "${program[@]}"
fi
