#!/usr/bin/env bash
# Between a launcher and its program, under an ncu recipe: one rank is measured, ncu does not see the others.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: RECIPE --rank N [OPTION]... -- LAUNCHER... rank.sh PROGRAM [ARGUMENT]...

Under one ncu, ranks launch their kernels one after the other, and those that wait for each other hang, as NCCL's do. The
launcher starts rank.sh on every rank; it becomes the program, on all ranks but N out of ncu's sight:

  kernels.sh -k nccl -s communication --window --rank 0 -- \
    torchrun --nproc-per-node 8 --no-python /path/to/rank.sh python train.py
  layer.sh -l model.layers.3 -s communication --rank 0 -- accelerate launch --no_python /path/to/rank.sh python train.py
  layer.sh -l model.layers.3 --rank 0 --replay kernel -- mpirun -np 8 /path/to/rank.sh python train.py

For each pass ncu runs the launcher again, so that every rank takes part in it: 3 times with the set communication, many
times with others. What does not communicate is measured in one run with --replay kernel.

The rank is taken from RANK, OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK or SLURM_PROCID, the first that is set. Where no
recipe is around it, on other hosts for one, rank.sh becomes the program and nothing more.
Exit status: the program's own; 2 where no rank is known or the recipe has no --rank, 3 where nothing can run in TMPDIR,
127 no program.
HELP
}

case ${1-} in
  -h | --help) usage; exit 0 ;;
  --) shift ;;
  -*) fail 2 "no option $1; see $me --help" ;;
esac
[ $# -gt 0 ] || fail 2 "no program to run; needed: LAUNCHER... rank.sh python train.py"
need_program "$1"
measured=${NVPROF_KIT_NCU_RANK-}
if [ -z "$measured" ]; then
  [ -z "${NV_COMPUTE_PROFILER_PERFWORKS_DIR-}" ] || # what ncu sets for its programs
    fail 2 "which rank to measure is not known; needed: layer.sh --rank 0 ... -- LAUNCHER... rank.sh $*"
  exec "$@"
fi
find_rank
[ "$rank" -ne "$measured" ] || exec "$@"

# ncu leaves out what runs below an executable of that name, whatever the environment says; but NVTX would load it all the same
unset NVTX_INJECTION{32,64}_PATH CUDA_INJECTION{32,64}_PATH
shell=/bin/bash # one that finds its libraries wherever it lies
[ -x "$shell" ] || shell=$BASH
folder=$(mktemp -d -- "${TMPDIR:-/tmp}/nvprof_kit.XXXXXXXX") ||
  fail 3 "cannot write to ${TMPDIR:-/tmp}; set TMPDIR to a folder that can be written"
shadow=$folder/$hidden
if ! cp -- "$shell" "$shadow" || ! "$shadow" -p -c :; then
  rm -rf -- "$folder"
  fail 3 "nothing can run in ${TMPDIR:-/tmp}; set TMPDIR to a folder with room, whose programs may run"
fi
# shellcheck disable=SC2016  # for the other shell, which reads no BASH_ENV
exec "$shadow" -p -c 'rm -rf -- "${0%/*}"; exec -- "$@"' "$shadow" "$@"
