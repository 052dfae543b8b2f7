#!/usr/bin/env bash
# Measure one layer of a model with ncu, in one phase, by its NVTX range.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: layer.sh -l LAYER [OPTION]... -- PROGRAM [ARGUMENT]...

Measure the kernels that one layer of an annotated model launches, with everything nested in it:

  layer.sh -l model.layers.3 -p backward -- python train.py
  nvprof-kit ncu layers layer.csv

Options:
  -l, --layer LAYER   the layer's path, as nvprof-kit layers prints it
  -p, --phase PHASE   forward, backward or recompute (default: forward)
      --domain NAME   NVTX domain of the ranges (default: nvprof_kit; '' is the default domain)

With --replay range and app-range the layer's ranges are measured as a whole each; with app-range one of them, unless
--count says otherwise, since ncu 2025.3.1 hung in the second.

Common options:
HELP
  common_help
}

layer='' phase=forward domain=nvprof_kit
option() { # NAME VALUE
  case $1 in
    layer) layer=$2 ;;
    phase) one_of "$given" "$2" forward backward recompute; phase=$2 ;;
    domain) domain=$2 ;;
    *) common_option "$@" ;;
  esac
}

take_options "$@"
[ -n "$layer" ] || fail 2 "no layer; needed: layer.sh -l model.layers.3 -- python train.py"
[ ${#sets[@]} -gt 0 ] || sets=(speed-of-light memory tensor occupancy stalls)
case $replay in range | app-range)
  [ -z "$window" ] || fail 2 "with --replay $replay the layer's ranges are all there is; leave out --window, or choose by --skip and --count"
  # ncu 2025.3.1 hangs in the second one of a pass
  [ "$replay" = range ] || count=${count:-1} ;;
esac
output=${output:-layer}
range=$layer
[ "$phase" = forward ] || range="$layer $phase"
measure "$(nvtx_range "$domain" "$range")" -- "${program[@]}"
