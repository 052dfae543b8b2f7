#!/usr/bin/env bash
# Run a command in a container that lets Nsight do its work: GPUs, shared memory, the host's network, and the capabilities that
# CPU sampling and hardware counters need. This folder is the working directory, and the recipes are in /recipes:
#   IMAGE=nvcr.io/nvidia/pytorch:25.01-py3 container.sh /recipes/nsys/profile.sh python train.py
# ENGINE is docker, podman or apptainer, GPUS all, '' or numbers (docker, podman), MORE more options for the engine.
set -euo pipefail
recipes=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
read -ra more <<<"${MORE-}"
folders=("$recipes:/recipes:ro" "$PWD:$PWD")
gpus=${GPUS-all}
case ${ENGINE:=docker},$gpus in
  apptainer,*) exec apptainer exec --nv "${folders[@]/#/--bind=}" --pwd="$PWD" "${more[@]}" "${IMAGE:?}" "$@" ;;
  docker,[0-9]*) gpus="\"device=$gpus\"" ;;
esac
[ "$ENGINE" = docker ] && gpus=${gpus:+--gpus=$gpus} || gpus=${gpus:+--device=nvidia.com/gpu=$gpus}
# pinned memory for NCCL; podman without root can raise the limit no further than this shell can
if [ "$ENGINE" = docker ] || (ulimit -l unlimited) 2>/dev/null; then more=(--ulimit=memlock=-1 "${more[@]}"); fi
exec "$ENGINE" run --rm --init --interactive ${gpus:+"$gpus"} --shm-size=16g --network=host --cap-add=SYS_ADMIN \
  --security-opt=seccomp=unconfined "${folders[@]/#/--volume=}" --workdir="$PWD" "${more[@]}" "${IMAGE:?}" "$@"
