#!/usr/bin/env bash
# Measure with ncu what a roofline needs: operations, bytes, and the peaks of the GPU.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: roofline.sh [OPTION]... -- PROGRAM [ARGUMENT]...

Measure operations, bytes and peaks, of one layer or of every launch:

  roofline.sh -l model.layers.3 --window -- python train.py
  nvprof-kit ncu layers roofline.csv -o roofline.png

Options:
  -l, --layer LAYER   only this layer, forward, by its NVTX range
      --domain NAME   NVTX domain of the ranges (default: nvprof_kit; '' is the default domain)
HELP
  common_help
}

layer='' domain=nvprof_kit
option() { # NAME VALUE
  case $1 in
    layer) layer=$2 ;;
    domain) domain=$2 ;;
    *) common_option "$@" ;;
  esac
}

take_options "$@"
refuse_ranges "ncu gives no peaks"
sets+=(roofline)
output=${output:-roofline}
filter=()
[ -z "$layer" ] || filter=("$(nvtx_range "$domain" "$layer")")
measure "${filter[@]}" -- "${program[@]}"
