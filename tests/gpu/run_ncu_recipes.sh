#!/usr/bin/env bash
# Run `ncu profile` for real in each of its ways and say in a line each what it left. On a machine with a GPU, nsys, ncu and PyTorch, from the
# repository's root:
#   tests/gpu/run_ncu_recipes.sh FOLDER
# Leaves FOLDER/NAME.csv.xz of each and status.txt. With 2 layers and few launches each takes 20 to 50 s, those of
# several ranks, which are run on two GPUs alone, 160 s: `tests/gpu/run_ncu_recipes.sh FOLDER ranks` runs nothing else.
# Exits 1 if anything is not as it should be.
set -euo pipefail
out=${1:?usage: run_ncu_recipes.sh FOLDER [ranks]}
only=${2:-}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
program=("$python" tests/gpu/programs/train.py llama --layers 2 --width 512 --vocabulary 4096 --steps 1 --warm-up 1)
ranks=(torchrun --nproc-per-node 2 --no-python recipes/ncu/rank.sh "$python" tests/gpu/programs/parallel.py ddp)
failed=0

say() { # NAME OK TEXT
  [ "$2" = yes ] || failed=1
  printf '%-16s %-3s %s\n' "$1" "$2" "$3" | tee -a "$out/status.txt"
}

try() { # NAME LEAST-RESULTS OPTION...
  local name=$1 least=$2 status=0 began=$SECONDS results rows
  shift 2
  timeout --signal=TERM --kill-after=30 240 "$python" -m nvprof_kit ncu profile "$@" -o "$work/$name" -- "${program[@]}" \
    >"$work/log" 2>&1 || status=$?
  results=$(grep -c '^"[0-9]' "$work/$name.csv" 2>/dev/null) || results=${results:-0}
  rows=$("$python" -m nvprof_kit ncu layers "$work/$name.csv" --format csv 2>"$work/said" | tail -n +2 | wc -l) || rows=none
  if [ "$status" = 0 ] && [ "$results" -ge "$least" ] && [ "$rows" != none ]; then
    say "$name" yes "$results results, $rows rows of layers, $((SECONDS - began)) s"
  else
    say "$name" NO "status $status, $results results, $rows rows, $((SECONDS - began)) s: $(tail -1 "$work/log")"
    tail -20 "$work/log"
    cat "$work/said"
  fi
  grep 'left out' "$work/log" | tee -a "$out/status.txt" || :
  [ ! -e "$work/$name.csv" ] || xz -6 -c "$work/$name.csv" >"$out/$name.csv.xz"
}

{ nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1; ncu --version | tail -1; } | tee "$out/status.txt"
if [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
  one=("${program[@]}") program=("${ranks[@]}")
  try communication-ranks 4 -k nccl -s communication -x --launch-count=4 --rank 0 -x --profile-from-start=off
  program=("${one[@]}")
fi
[ "$only" != ranks ] || exit $failed
try layer-forward 20 -l model.layers.0 -x --profile-from-start=off
try layer-backward 20 -l "model.layers.0 backward" -s speed-of-light -x --profile-from-start=off
try kernels 5 -k 'nvjet|flash|cudnn|gemm' -x --launch-count=5 -s tensor -s speed-of-light -x --profile-from-start=off
try kernels-each 2 -k vectorized_elementwise_kernel -x --filter-mode=per-launch-config -x --launch-count=1 -s memory -x --profile-from-start=off
try roofline 20 -s roofline -l model.layers.0 -x --profile-from-start=off
try communication 3 -l model.layers.0 -s communication -x --launch-count=3 -x --profile-from-start=off
try range 1 -l model.layers.0 -s communication -x --replay-mode=app-range

# interrupted while it measures: nothing goes on running, and what is there can be read
"$python" -m nvprof_kit ncu profile -s roofline -o "$work/interrupted" -- "${program[@]}" --steps 1000 >"$work/log" 2>&1 &
running=$!
sleep 30
kill -TERM $running
status=0 began=$SECONDS
wait $running || status=$?
left=$(pgrep -fc -- '--steps 1000') || left=0
found=$(cd "$work" && echo interrupted.* .interrupted*)
if [ "$left" -eq 0 ] && [ "$status" -ne 0 ]; then say interrupted yes "status $status after $((SECONDS - began)) s, left: $found"
else say interrupted NO "status $status, $left processes go on, left: $found: $(tail -1 "$work/log")"; fi

"$python" -m nvprof_kit ncu layers "$work/roofline.csv" -o "$out/roofline.png" && say roofline-plot yes "$(stat -c %s "$out/roofline.png") bytes"
ncu --import "$work/roofline.ncu-rep" --page details --csv --print-units base | xz -9e >"$out/roofline-details.csv.xz"
ncu --import "$work/roofline.ncu-rep" --page details --csv | xz -9e >"$out/roofline-details-units.csv.xz"
exit $failed
