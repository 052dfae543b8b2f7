#!/usr/bin/env bash
# Measure with ncu what the plan of `nvprof-kit ncu plan` promises: the run of the plan against the run of every launch, in
# time and in what they say of each layer; and take the captures that the tests read. Run on a machine with a GPU, nsys, ncu
# and PyTorch, from the repository's root:
#   tests/gpu/take_ncu.sh FOLDER [SCRUB [ARGUMENT-OF-train.py...]]
# The default model needs about 13 minutes in all, most of it the full run, which FULL_LIMIT (seconds) ends early; WITHOUT_METRICS=1
# leaves the last capture out. Leaves in FOLDER: times.txt, compare.txt, and packed with xz run.sqlite (nsys), full.csv (of ncu, the
# columns that tables of layers are made of), plan.csv, plan.ncu-rep (ncu), metrics.sqlite (nsys with GPU metric samples). SCRUB is a command `SCRUB IN.sqlite OUT.sqlite` that removes private facts.
set -euo pipefail
out=${1:?usage: take_ncu.sh FOLDER [SCRUB [ARGUMENT...]]}
scrub=${2:-cp}
model=("${@:3}")
[ ${#model[@]} -gt 0 ] || model=(encoder --layers 28 --width 512 --vocabulary 4096 --batch 2)
full_limit=${FULL_LIMIT:-1000}
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
program=("$python" tests/gpu/programs/train.py "${model[@]}")
window=(-x --capture-range=cudaProfilerApi -x --capture-range-end=stop)
export LC_ALL=C

say() { echo "$*" | tee -a "$out/times.txt"; }

timed() { # NAME COMMAND...: run it, note how long it took; sets `took`
  local name=$1 begin=$EPOCHREALTIME status=0
  shift
  "$@" > "$work/$name.log" 2>&1 || status=$?
  took=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")
  say "$name: $took s, status $status"
  [ "$status" = 0 ] || { tail -20 "$work/$name.log"; return 1; }
}

keep() { for file in "$@"; do xz -6 -T0 -c "$work/$file" > "$out/$file.xz"; done; }

results_in() { grep -c '^"[0-9]' "$1"; }

{ nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; ncu --version | tail -1; nsys --version; } > "$out/times.txt"
say "${model[*]}, one training step"

timed plain "${program[@]}" --steps 1
memory=$(sed -n 's/.* \([0-9.]*\) GB held.*/\1/p' "$work/plain.log")
say "holds $memory GB"
timed nsys python3 -m nvprof_kit profile -o "$work/nsys" "${window[@]}" -- "${program[@]}" --steps 2
$scrub "$work/nsys.sqlite" "$work/run.sqlite"
keep run.sqlite
"$python" -m nvprof_kit ncu plan "$work/run.sqlite" --every-layer --memory-gb "$memory" --script "$work/plan.sh" > "$work/plan.txt"
head -3 "$work/plan.txt" | tee -a "$out/times.txt"
timed plan "$work/plan.sh" -o "$work/plan" -- "${program[@]}" --steps 1
plan_took=$took
say "planned results: $(results_in "$work/plan.csv"), launches $(sed -n "s/^numbers=//p" "$work/plan.sh") of each"
keep plan.csv plan.ncu-rep

timed full timeout --signal=INT --kill-after=30 "$full_limit" ncu --target-processes all --nvtx --set basic --replay-mode kernel \
  --clock-control none --cache-control all --profile-from-start off --export "$work/full" "${program[@]}" --steps 1 ||
  say "the full run was ended after $full_limit s"
full_took=$took
ncu --import "$work/full.ncu-rep" --page raw --csv --print-units base > "$work/full.csv"
say "full results: $(results_in "$work/full.csv")"
say "the plan's run took $(awk "BEGIN { printf \"%.1f %%\", 100 * $plan_took / $full_took }") of the full run's time"
"$python" tests/gpu/programs/compare_ncu.py "$work/full.csv" "$work/plan.csv" "$work/run.sqlite" | tee "$out/compare.txt"
"$python" tests/gpu/programs/shorten_ncu.py "$work/full.csv" > "$work/short.csv"
mv "$work/short.csv" "$work/full.csv"
keep full.csv

[ -z "${WITHOUT_METRICS-}" ] || exit 0
timed metrics python3 -m nvprof_kit profile -o "$work/sampled" "${window[@]}" -p metrics -x --gpu-metrics-frequency=20000 -- \
  "$python" tests/gpu/programs/train.py llama --layers 4 --steps 10 || true
if [ -e "$work/sampled.sqlite" ]; then
  $scrub "$work/sampled.sqlite" "$work/metrics.sqlite"
  keep metrics.sqlite
fi
ls -l "$out"
