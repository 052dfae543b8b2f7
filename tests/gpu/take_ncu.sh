#!/usr/bin/env bash
# Measure with ncu what the plan of `nvprof-kit ncu plan` promises, and take the captures its tests read. Run on a machine with a
# GPU, nsys, ncu and PyTorch, from the repository's root:
#   [LAYERS=12] tests/gpu/take_ncu.sh FOLDER [SCRUB]
# Leaves in FOLDER: times.txt, and packed with xz run.sqlite (nsys), full.csv, full-details.csv, plan.csv, plan.ncu-rep (ncu) and
# metrics.sqlite (nsys with GPU metric samples). SCRUB is a command `SCRUB IN.sqlite OUT.sqlite` that removes private facts.
set -euo pipefail
out=${1:?usage: take_ncu.sh FOLDER [SCRUB]}
scrub=${2:-cp}
layers=${LAYERS:-12}
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
program=("$python" tests/gpu/programs/train.py llama --layers "$layers")
window=(-x --capture-range=cudaProfilerApi -x --capture-range-end=stop)
export LC_ALL=C

timed() { # NAME COMMAND...: run it, note how long it took
  local name=$1 begin=$EPOCHREALTIME status=0
  shift
  "$@" > "$work/$name.log" 2>&1 || status=$?
  printf '%s: %s s, status %s\n' "$name" "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")" "$status" |
    tee -a "$out/times.txt"
  [ "$status" = 0 ] || { tail -20 "$work/$name.log"; return 1; }
}

export_csv() { # NAME: its raw page, and the details page as NAME-details.csv
  ncu --import "$work/$1.ncu-rep" --page raw --csv --print-units base > "$work/$1.csv"
  ncu --import "$work/$1.ncu-rep" --page details --csv --print-units base > "$work/$1-details.csv"
}

keep() { for file in "$@"; do xz -9e -T0 -c "$work/$file" > "$out/$file.xz"; done; }

{ nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; ncu --version | tail -1; nsys --version; } > "$out/times.txt"
echo "llama, $layers layers, one training step" | tee -a "$out/times.txt"

timed plain "${program[@]}" --steps 1
timed nsys recipes/nsys/profile.sh -o "$work/nsys" "${window[@]}" -- "${program[@]}" --steps 2
$scrub "$work/nsys.sqlite" "$work/run.sqlite"
keep run.sqlite
"$python" -m nvprof_kit ncu plan "$work/run.sqlite" --every-layer --script "$work/plan.sh" > "$work/plan.txt"
head -3 "$work/plan.txt" | tee -a "$out/times.txt"
timed plan "$work/plan.sh" -o "$work/plan" -- "${program[@]}" --steps 1 || true
if [ -e "$work/plan.csv" ]; then
  echo "planned results: $(grep -c '^"[0-9]' "$work/plan.csv")" | tee -a "$out/times.txt"
  keep plan.csv plan.ncu-rep
fi
timed metrics recipes/nsys/profile.sh -o "$work/sampled" "${window[@]}" -x --gpu-metrics-device=all -x \
  --gpu-metrics-frequency=20000 -- "$python" tests/gpu/programs/train.py llama --layers 4 --steps 10 || true
if [ -e "$work/sampled.sqlite" ]; then
  $scrub "$work/sampled.sqlite" "$work/metrics.sqlite"
  keep metrics.sqlite
fi
timed full ncu --target-processes all --nvtx --set basic --replay-mode kernel --clock-control none --cache-control all \
  --profile-from-start off --export "$work/full" "${program[@]}" --steps 1
export_csv full
echo "full results: $(grep -c '^"[0-9]' "$work/full.csv")" | tee -a "$out/times.txt"
keep full.csv full-details.csv
ls -l "$out"
