#!/usr/bin/env bash
# Take the H200 captures under tests/data/ anew. Run on a machine with a GPU, nsys and PyTorch, from the repository's root:
#   tests/gpu/take_captures.sh FOLDER [SCRUB [NAME...]]
# Leaves FOLDER/NAME.sqlite.xz; SCRUB is a command `SCRUB IN.sqlite OUT.sqlite` that removes private facts from a capture.
set -euo pipefail
out=${1:?usage: take_captures.sh FOLDER [SCRUB [NAME...]]}
scrub=${2:-cp}
version=$(nsys --version | grep -oE '[0-9]+\.[0-9]+' | head -1)
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

take() { # NAME PROGRAM [ARGUMENT]...
  local name=$1-$version
  shift
  python3 -m nvprof_kit profile -o "$work/$name" -x --capture-range=cudaProfilerApi -x --capture-range-end=stop -- \
    python3 "tests/gpu/programs/$1" "${@:2}" > "$work/$name.log" 2>&1 || { cat "$work/$name.log"; return 1; }
  $scrub "$work/$name.sqlite" "$work/$name.scrubbed.sqlite"
  xz -9e -c "$work/$name.scrubbed.sqlite" > "$out/$name.sqlite.xz"
  ls -l "$out/$name.sqlite.xz"
}

if [ $# -ge 3 ]; then names=("${@:3}"); else
  names=(llama gpt2 encoder eager checkpoint checkpoint-reentrant checkpoint-inside graph graphed-callables
    compile-blocks compile-model inductor-graphs generate)
fi
for name in "${names[@]}"; do
  case $name in
    llama | gpt2 | encoder) take "$name" train.py "$name" --layers 4 --steps 2 ;;
    *) take "$name" variants.py "$name" ;;
  esac
done
