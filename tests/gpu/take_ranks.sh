#!/usr/bin/env bash
# Take the captures of jobs under tests/data/ranks/ anew: DDP, FSDP2, tensor parallel and a pipeline, each with a fault in a layer,
# in the host, in the data loader, and with none (tests/gpu/programs/ranks.py). Run from the repository's root on a machine with
# two GPUs, nsys and PyTorch; without a GPU the programs run over gloo, and what nsys writes has no GPU in it:
#   tests/gpu/take_ranks.sh FOLDER [KIND...]
# Leaves in FOLDER/nsys and FOLDER/kineto what a run of ranks.sh and one of the embedded recorder wrote, packed. Nothing is scrubbed
# here: see nvprof-kit scrub.
# RANKS is the number of ranks (2). They share the GPUs that there are, which takes NCCL 2.30, NCCL_MULTI_RANK_GPU_ENABLE=1 and CUDA's
# Multi-Process Service (nvidia-cuda-mps-control -d).
# FAULTS names other faults, by blanks; those of rank_faults.py are also written down as they happen, in FOLDER/truth:
#   FAULTS="optimizer copy gc rotating none" tests/gpu/take_ranks.sh FOLDER ddp
#   xz -dk FOLDER/nsys/*.xz && python3 tests/gpu/programs/rank_truth.py FOLDER/nsys FOLDER/truth
set -euo pipefail
out=$(realpath -m "${1:?usage: take_ranks.sh FOLDER [KIND...]}")
kinds=("${@:2}")
[ ${#kinds[@]} -gt 0 ] || kinds=(ddp fsdp tensor pipeline)
read -ra faults <<<"${FAULTS:-layer host loader none}"
version=$(nsys --version | grep -oE '[0-9]+\.[0-9]+' | head -1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"/{nsys,kineto,truth} "$work"/{nsys,kineto}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
torchrun=(python3 -m torch.distributed.run --nproc-per-node "${RANKS:-2}" --max-restarts 0)
window=(-x --capture-range=cudaProfilerApi -x "--capture-range-end=repeat:${#faults[@]}")
python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { window=() && faults=(layer); }
all=$(IFS=,; echo "${faults[*]}")

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

under_nsys() { # KIND; a report of each rank and fault: KIND-FAULT.rankR-VERSION.sqlite
  local file name rank place
  timeout 150 "${torchrun[@]}" --no-python "$python" -m nvprof_kit ranks profile --ranks all -o "$work/nsys/$1" "${window[@]}" -- \
    python3 tests/gpu/programs/ranks.py "$1" --faults "$all" --truth "$out/truth/$1" \
    >"$work/$1-nsys.log" 2>&1 || { tail -30 "$work/$1-nsys.log"; return 1; }
  for file in "$work/nsys/$1"-*.sqlite; do
    name=${file##*/} rank=${name##*-rank} place=1
    case $name in *.[0-9].sqlite) place=${name%.sqlite} place=${place##*.} ;; esac
    mv "$file" "$work/nsys/$1-${faults[place - 1]}.rank${rank%%-*}-$version.sqlite"
    echo "$1-${faults[place - 1]}.rank${rank%%-*}-$version.sqlite was $name" >>"$out/nsys/names.txt"
  done
}

recorded() { # KIND; traces of the embedded recorder
  NVPROF_KIT_RUN_ID="$1-$(date +%s)" timeout 100 "${torchrun[@]}" tests/gpu/programs/ranks.py "$1" --faults "$all" \
    --record "$work/kineto" >"$work/$1-recorded.log" 2>&1 || { tail -20 "$work/$1-recorded.log"; return 1; }
}

# shellcheck disable=SC2016 # the inner shell expands what is quoted
pack() { # FOLDER SUFFIX; what is new in it, by as many processes as fit
  (cd "$work/$1" && find . -name "*.$2" -newer "$work/packed" -print0) |
    (cd "$work/$1" && xargs -0 -r -P 16 -I{} sh -c 'xz -6 -c "$1" >"$2/$1.xz"' - {} "$out/$1")
}

for kind in "${kinds[@]}"; do
  touch "$work/packed"
  under_nsys "$kind" || say "$kind: NOT captured by nsys"
  say "$kind under nsys"
  recorded "$kind" || say "$kind: NOT recorded"
  say "$kind recorded"
  gunzip -f "$work"/kineto/*.json.gz 2>/dev/null && touch "$work"/kineto/"$kind"-*.json
  pack nsys sqlite
  pack kineto json
  say "$kind packed"
done
python3 tests/gpu/programs/ranks_table.py "$work/nsys"
