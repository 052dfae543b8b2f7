#!/usr/bin/env bash
# Run a command in a container that lets Nsight do its work: the GPUs, shared memory, the host's network, and the
# capabilities that CPU sampling and hardware counters need.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: container.sh --image IMAGE [OPTION]... -- COMMAND [ARGUMENT]...

Run COMMAND in a container, in this folder, with the recipes under /recipes:

  container.sh --image nvcr.io/nvidia/pytorch:25.01-py3 -- /recipes/nsys/profile.sh -- python train.py

Options:
  -i, --image IMAGE   the image; for apptainer a .sif file or docker://...
  -e, --engine NAME   docker, podman or apptainer (default: the first of them on PATH)
  -g, --gpus LIST     all (default), none, or numbers such as 0,1
      --nsight DIR    mount this folder of the host, an installation of Nsight Systems with bin/nsys in it, for images
                      that have none; NSYS is set to it
  -v, --volume A:B    mount A of the host as B; may be given again
      --shm SIZE      shared memory, which dataloader workers and NCCL need (default: 16g)
      --unprivileged  without the capabilities: no CPU samples and no hardware counters, kernels and ranges as always
  -x, --extra OPTION  one more option for the engine, as it stands; may be given again
  -n, --dry-run       print the command and run nothing
  -h, --help          print this and exit

What the options stand for: CAP_SYS_ADMIN for hardware counters (nsys --gpu-metrics-devices, ncu) unless the driver opens
them to everyone, and with it perf_event_open for CPU samples, which the default seccomp profile forbids.

Exit status: the command's own; 2 for a wrong call, 3 where there is no container engine.
HELP
}

image='' engine='' gpus=all nsight='' volumes=() shm=16g privileges=yes extra=() dry_run=''
option() { # NAME VALUE
  case $1 in
    image) image=$2 ;;
    engine) engine=$2 ;;
    gpus) gpus=$2 ;;
    nsight) nsight=$2 ;;
    volume) volumes+=("$2") ;;
    shm) shm=$2 ;;
    unprivileged) privileges='' ;;
    extra) extra+=("$2") ;;
    dry-run) dry_run=yes ;;
  esac
}

take_options "$@"
[ -n "$image" ] || fail 2 "no image; needed: container.sh --image IMAGE -- COMMAND"
[ ${#program[@]} -gt 0 ] || fail 2 "no command to run; needed: container.sh --image IMAGE -- COMMAND"
[ -n "$gpus" ] || fail 2 "--gpus '': needed all, none, or numbers such as 0,1"
if [ -n "$nsight" ]; then
  [ -x "$nsight/bin/nsys" ] || fail 2 "--nsight $nsight: there is no bin/nsys in it"
  nsight=$(CDPATH='' cd -- "$nsight" && pwd)
fi
if [ -z "$engine" ]; then
  for engine in docker podman apptainer none; do
    ! command -v "$engine" >/dev/null || break
  done
  [ "$engine" != none ] || [ -z "$dry_run" ] || engine=docker
fi
root=$(cd "$here/.." && pwd)
case $root$PWD$nsight in *:*) fail 2 "a folder with a colon in its name cannot be mounted: $root, $PWD${nsight:+, $nsight}" ;; esac
volumes+=("$root:/recipes:ro" "$PWD:$PWD")
[ -z "$nsight" ] || volumes+=("$nsight:$nsight:ro")

case $engine in
  docker | podman)
    command=("$engine" run --rm --init "--shm-size=$shm" --network=host)
    case $engine,$gpus in
      *,none) ;;
      docker,all) command+=(--gpus=all) ;;
      docker,*) command+=("--gpus=\"device=$gpus\"") ;;
      podman,all) command+=(--device=nvidia.com/gpu=all) ;;
      podman,*) for gpu in ${gpus//,/ }; do command+=("--device=nvidia.com/gpu=$gpu"); done ;;
    esac
    [ -z "$privileges" ] || command+=(--cap-add=SYS_ADMIN --security-opt=seccomp=unconfined)
    # pinned memory for NCCL and RDMA; podman without root can raise it no further than this shell can
    if [ "$engine" = docker ] || (ulimit -l unlimited) 2>/dev/null; then command+=(--ulimit=memlock=-1); fi
    for volume in "${volumes[@]}"; do command+=("--volume=$volume"); done
    command+=("--workdir=$PWD")
    [ -z "$nsight" ] || command+=("--env=NSYS=$nsight/bin/nsys")
    command+=(--interactive)
    [ ! -t 0 ] || [ ! -t 1 ] || [ -n "$dry_run" ] || command+=(--tty)
    ;;
  apptainer)
    case $root$PWD$nsight in *,*) fail 2 "apptainer cannot mount a folder with a comma in its name: $root, $PWD${nsight:+, $nsight}" ;; esac
    # shares network, shared memory and user with the host; capabilities are the administrator's to grant
    command=(apptainer exec)
    [ "$gpus" = none ] || command+=(--nv)
    case $gpus in all | none) ;; *) command+=("--env=CUDA_VISIBLE_DEVICES=$gpus") ;; esac
    [ -z "$privileges" ] || [ "$(id -u)" -ne 0 ] || command+=(--add-caps=CAP_SYS_ADMIN)
    for volume in "${volumes[@]}"; do command+=("--bind=$volume"); done
    command+=("--pwd=$PWD")
    [ -z "$nsight" ] || command+=("--env=NSYS=$nsight/bin/nsys")
    ;;
  none) fail 3 "no container engine: none of docker, podman and apptainer is on PATH" ;;
  *) fail 2 "--engine $engine: none of docker, podman, apptainer" ;;
esac
command+=("${extra[@]}" "$image" "${program[@]}")
if [ -n "$dry_run" ]; then
  print_command "${command[@]}"
  exit 0
fi
command -v "$engine" >/dev/null || fail 3 "no $engine on PATH"
exec "${command[@]}"
