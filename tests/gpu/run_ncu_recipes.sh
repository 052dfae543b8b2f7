#!/usr/bin/env bash
# Run every ncu recipe for real. On a machine with a GPU, ncu and PyTorch, from the repository's root:
#   tests/gpu/run_ncu_recipes.sh FOLDER [CAPTURE.sqlite]
# Leaves FOLDER/NAME.csv.xz of each recipe and status.txt. With 2 layers and few launches each takes about half a minute.
set -euo pipefail
out=${1:?usage: run_ncu_recipes.sh FOLDER [CAPTURE.sqlite]}
capture=${2:-}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
program=(python3 tests/gpu/programs/train.py llama --layers 2 --steps 1 --warm-up 1)

try() { # NAME RECIPE [OPTION]...
  local name=$1 status=0
  shift
  "recipes/ncu/$1" "${@:2}" --window -o "$work/$name" -- "${program[@]}" > "$work/log" 2>&1 || status=$?
  printf '%s: status %s, %s results\n' "$name" "$status" "$(grep -c '^"[0-9]' "$work/$name.csv" 2>/dev/null || echo 0)" |
    tee -a "$out/status.txt"
  [ "$status" = 0 ] || tail -20 "$work/log"
  [ ! -e "$work/$name.csv" ] || xz -9e -c "$work/$name.csv" > "$out/$name.csv.xz"
}

: > "$out/status.txt"
try layer-forward layer.sh -l model.layers.0
try layer-backward layer.sh -l model.layers.0 -p backward -s speed-of-light
try kernels kernels.sh -k 'nvjet|flash|cudnn' --count 5 -s tensor -s speed-of-light
try kernels-each kernels.sh -k vectorized_elementwise_kernel --each -s memory
try roofline roofline.sh -l model.layers.0
try communication layer.sh -l model.layers.0 -s communication --count 3
[ -z "$capture" ] || try top top.sh -c "$capture" --top 5 -s speed-of-light
ncu --import "$work/layer-forward.ncu-rep" --page details --csv --print-units base | xz -9e > "$out/layer-details.csv.xz"
