#!/usr/bin/env bash
# What memory is on an H200: captures whose layers carry it, what MemoryProfiler accounts for, snapshots. Run from the
# repository's root, with nsys and PyTorch:
#   tests/gpu/take_memory.sh FOLDER [SCRUB]
# SCRUB is a command `SCRUB IN.sqlite OUT.sqlite` that removes private facts from a capture.
set -euo pipefail
out=${1:?usage: take_memory.sh FOLDER [SCRUB]}
scrub=${2:-cp}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
programs=tests/gpu/programs
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

take() { # NAME PROGRAM [ARGUMENT]...
  python3 -m nvprof_kit profile -o "$work/$1" -p memory -- python3 "${@:2}" > "$work/$1.log" 2>&1 || { cat "$work/$1.log"; return 1; }
  $scrub "$work/$1.sqlite" "$work/$1.scrubbed.sqlite"
  xz -9e -c "$work/$1.scrubbed.sqlite" > "$out/$1.sqlite.xz"
  ls -l "$out/$1.sqlite.xz"
}

small=(llama --layers 2 --width 512 --vocabulary 4000 --warm-up 1 --steps 2)
take memory "$programs/train.py" "${small[@]}"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 take memory-uncached "$programs/train.py" "${small[@]}"
for way in plain checkpoint; do
  option=(); [ "$way" = plain ] || option=(--checkpoint)
  python3 "$programs/memory.py" "$out/$way" "${option[@]}" 2>&1 | tee "$out/memory-$way.txt"
  python3 "$programs/memory.py" "$out/$way" "${option[@]}" --layers 4 --stacks 2>&1 | tee "$out/stacks-$way.txt"
done
python3 "$programs/snapshot.py" "$work/snapshot"
mkdir -p "$out/snapshot"
cp "$work/snapshot/expected.json" "$out/snapshot/"
for file in "$work"/snapshot/*.pickle; do xz -9e -c "$file" > "$out/snapshot/$(basename "$file").xz"; done
