#!/usr/bin/env bash
# Between a launcher and its program: profile some of the ranks, each into a report of its own, and run the others plain.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: LAUNCHER... ranks.sh [OPTION]... -- PROGRAM [ARGUMENT]...

The launcher starts ranks.sh on every rank; it becomes profile.sh on those chosen and the program itself on the others:

  torchrun --nproc-per-node 8 --no-python ranks.sh --ranks 0,7 -- python train.py
  accelerate launch --no_python ranks.sh --ranks 0 -- python train.py
  deepspeed --no_python --no_local_rank ranks.sh --ranks 0 -- python train.py
  srun ranks.sh --ranks 0-31:8 -- python train.py
  mpirun -np 8 ranks.sh --ranks all -- python train.py

Each leaves NAME-RUN-HOST-rankR-TIME.nsys-rep and .sqlite; then: nvprof-kit layers NAME-*.sqlite
RUN is the same on all ranks of a run, and the program's own mark in the capture has it too.

Options:
  -r, --ranks LIST    which ranks: all, or numbers, ranges and strides such as 0,3 or 0-7 or 0-31:8 (default: 0)
      --local         LIST counts the ranks of each host: --ranks 0 --local profiles one on every host
  -o, --output NAME   beginning of the reports' names (default: run)
  -n, --dry-run       print what this rank would run, and run nothing
  -h, --help          print this and exit

Every other option is profile.sh's (see profile.sh --help): --step 12, --preset metrics, ... With --preset metrics each
rank samples the GPU of its own local rank, since a GPU can be sampled only once.

The rank is taken from RANK, OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK or SLURM_PROCID, the first that is set.
RUN is NVPROF_KIT_RUN_ID, else the id of torchrun's --rdzv-id, of Slurm's job and step, or of mpirun's PMIx, else, where all
ranks are of this host, the launcher's process; else it is left out, and the programs are told none.
Exit status: the program's own; 2 for a wrong call or where no rank is known, 3 where there is no nsys.
HELP
}

# Whether a number is in a list such as 0,3,8-15,0-31:8.
in_list() { # NUMBER LIST
  local part rest="${2%,}," first last stride found=1 number='0*(0|[1-9][0-9]{0,8})'
  [ "$2" != all ] || return 0
  while [ -n "$rest" ]; do
    part=${rest%%,*} rest=${rest#*,}
    [[ $part =~ ^$number(-$number(:0*([1-9][0-9]{0,8}))?)?$ ]] ||
      fail 2 "--ranks $2: '$part' is no rank, no range 0-7 and no stride 0-31:8"
    first=${BASH_REMATCH[1]} last=${BASH_REMATCH[3]:-${BASH_REMATCH[1]}} stride=${BASH_REMATCH[5]:-1}
    [ "$first" -le "$last" ] || fail 2 "--ranks $2: no rank lies from $first to $last"
    [ "$1" -lt "$first" ] || [ "$1" -gt "$last" ] || [ $((($1 - first) % stride)) -ne 0 ] || found=0
  done
  return "$found"
}

# What the ranks of one run have in common: told by the user or the launcher, or the launcher's process and its start.
common_id() {
  local all here_ranks process id=${NVPROF_KIT_RUN_ID-}
  case ${TORCHELASTIC_RUN_ID-} in '' | none) ;; *) id=${id:-$TORCHELASTIC_RUN_ID} ;; esac
  [ -z "${SLURM_JOB_ID-}" ] || id=${id:-$SLURM_JOB_ID${SLURM_STEP_ID:+.$SLURM_STEP_ID}}
  id=${id:-${PMIX_NAMESPACE-}}
  all=$(first_number WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE)
  here_ranks=$(first_number LOCAL_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS)
  if [ -z "$id" ] && [ -n "$all" ] && [ "$all" = "$here_ranks" ] && read -r process 2>/dev/null <"/proc/$PPID/stat"; then
    read -ra process <<<"${process##*) }"
    id=$PPID.${process[19]} # its number and its start, in ticks since the boot
  fi
  [ -z "$id" ] || [ "${TORCHELASTIC_RESTART_COUNT:-0}" = 0 ] || id+=.restart$TORCHELASTIC_RESTART_COUNT
  printf '%s' "${id//[!A-Za-z0-9._-]/_}"
}

# The number that nsys has for the GPU of a local rank: CUDA_VISIBLE_DEVICES renames the GPUs for the program, not for nsys.
gpu_of() { # LOCAL-RANK
  local visible=() gpu number id
  IFS=, read -r -a visible <<<"${CUDA_VISIBLE_DEVICES-}"
  # a launcher that shows each rank one GPU, srun for one
  [ ${#visible[@]} -ne 1 ] || set -- 0
  gpu=${visible[$1]-$1}
  gpu=${gpu//[[:space:]]/}
  case $gpu in
    GPU-* | MIG-*)
      while IFS=', ' read -r number id; do
        case $id in "$gpu"*) gpu=$number; break ;; esac
      done < <(nvidia-smi --query-gpu=index,uuid --format=csv,noheader 2>/dev/null) ;;
  esac
  printf '%s' "$gpu"
}

ranks=0 local='' output=run dry_run='' metrics='' options=()
option() { # NAME VALUE
  case $1 in
    ranks) ranks=$2 ;;
    local) local=yes ;;
    output) output=$2 ;;
    dry-run) dry_run=yes ;;
    *)
      [ "$1=$2" != preset=metrics ] || metrics=yes
      if [ -n "${takes_value[$1]}" ]; then options+=("$given" "$2"); else options+=("$given"); fi ;;
  esac
}

# profile.sh's options are ranks.sh's too
read_options "$(sed -n "/<<'HELP'/,/^HELP/p" "$here/profile.sh")"
take_options "$@"
need_name "${output%.nsys-rep}"
[ ${#program[@]} -gt 0 ] || fail 2 "no program to run; needed: torchrun ... --no-python $me [OPTION]... -- python train.py"

find_rank
local_rank=$(first_number LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID SLURM_LOCALID)
[ -z "$local" ] || [ -n "$local_rank" ] ||
  fail 2 "--local: no local rank is known: none of LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID, SLURM_LOCALID is set"

NVPROF_KIT_RUN_ID=$(common_id)
[ -z "$NVPROF_KIT_RUN_ID" ] || export NVPROF_KIT_RUN_ID

chosen=$rank
[ -z "$local" ] || chosen=$local_rank
command=("${program[@]}")
if in_list "$chosen" "$ranks"; then
  [ -z "$metrics" ] || [ -z "$local_rank" ] || options+=(--nsys "--gpu-metrics-devices=$(gpu_of "$local_rank")")
  host=$(uname -n) # HOSTNAME may be that of another host, which Slurm brings along
  name=${output%.nsys-rep}${NVPROF_KIT_RUN_ID:+-$NVPROF_KIT_RUN_ID}-${host//[!A-Za-z0-9._-]/_}-rank$rank-$(date +%Y%m%d-%H%M%S)
  command=(bash "$here/profile.sh" --output "$name" "${options[@]}" ${dry_run:+--dry-run} -- "${program[@]}")
elif [ -n "$dry_run" ]; then
  print_command "${program[@]}"
  exit 0
fi
exec "${command[@]}"
