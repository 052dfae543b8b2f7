#!/usr/bin/env bash
# Run container.sh for real, over this machine's own files, which needs no image, with its GPUs. As root on a machine with a GPU,
# podman or apptainer, nsys, ncu and PyTorch, from the repository's root:
#   tests/gpu/check_container.sh FOLDER
#   ENGINE=apptainer RUN_AS=nobody tests/gpu/check_container.sh FOLDER
# An overlay of / lacks what is mounted below it: CONTAINER_OPTIONS are more words for container.sh, such as
# --volume=/usr/local/nvidia:/usr/local/nvidia where the driver's libraries are mounted there; apptainer finds them itself.
# Leaves FOLDER/status.txt and a line for each of: a profile, GPU metrics, one GPU of several, all,
# ncu, the exit status.
# Exits 1 if anything is not as it should be.
set -euo pipefail
out=${1:?usage: check_container.sh FOLDER}
engine=${ENGINE:-podman} as=()
[ -z "${RUN_AS-}" ] || as=(runuser -u "$RUN_AS" -- env HOME=/tmp)
for name in "$engine" nsys ncu; do
  command -v "$name" >/dev/null || { echo "check_container.sh: no $name on PATH" >&2; exit 2; }
done
mkdir -p "$out"
python=${PYTHON:-python3}
nsight=${NSIGHT:-$(dirname -- "$(dirname -- "$(readlink -f -- "$(command -v nsys)")")")}
work=$(mktemp -d "$PWD/.container.XXXXXX") # in the folder that the container shares
spec=/etc/cdi/nvidia-as-it-is.yaml
root='' # of apptainer, which takes a folder as it is
# shellcheck disable=SC2329  # by the trap
end() {
  rm -rf "$work" "$spec"
  [ -z "$root" ] || { umount "$root/all" && rm -rf "$root"; }
}
trap end EXIT
chmod 777 "$work"
failed=0

say() { # NAME OK TEXT
  [ "$2" = yes ] || failed=1
  printf '%-12s %-3s %s\n' "$1" "$2" "$3" | tee -a "$out/status.txt"
}

# What NVIDIA's toolkit writes for podman, less the driver's libraries, which are among this machine's files.
write_spec() {
  local node gpu common=()
  for node in /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-uvm-tools /dev/nvidia-modeset /dev/nvidia-caps/*; do
    [ ! -c "$node" ] || common+=("$node")
  done
  mkdir -p "${spec%/*}"
  {
    printf 'cdiVersion: "0.5.0"\nkind: nvidia.com/gpu\ncontainerEdits:\n  deviceNodes:\n'
    printf '    - path: %s\n' "${common[@]}"
    printf 'devices:\n'
    for gpu in /dev/nvidia[0-9]*; do
      printf -- '  - name: "%s"\n    containerEdits:\n      deviceNodes:\n        - path: %s\n' "${gpu#/dev/nvidia}" "$gpu"
    done
    printf '  - name: all\n    containerEdits:\n      deviceNodes:\n'
    printf '        - path: %s\n' /dev/nvidia[0-9]*
  } >"$spec"
}

inside() { # COMMAND...
  local name more=("--volume=$nsight:$nsight:ro" "--env=NSYS=$nsight/bin/nsys") image=/:O
  for name in PATH LD_LIBRARY_PATH PYTHONPATH; do more+=("--env=$name=${!name-}"); done
  case $engine in
    podman) more+=(--rootfs) ;;
    apptainer) image=$root/all more[0]="--bind=$nsight:$nsight:ro" ;;
  esac
  "${as[@]}" env ENGINE="$engine" IMAGE="$image" GPUS="${GPUS-all}" MORE="${more[*]} ${CONTAINER_OPTIONS-}" recipes/nsys/container.sh "$@"
}

rows() { # FILE VERB...; rows of a table that the package makes of a capture
  "$python" -m nvprof_kit "${@:2}" "$1" --format csv 2>/dev/null | tail -n +2 | grep -c . || :
}

if [ "$engine" = apptainer ]; then
  root=$(mktemp -d)
  mkdir "$root/all" "$root/upper" "$root/work"
  chmod 755 "$root"
  mount -t overlay overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" "$root/all"
elif [ ! -e /etc/cdi/nvidia.yaml ] && [ ! -e /var/run/cdi/nvidia.yaml ]; then
  write_spec
fi
program=("$python" tests/gpu/programs/train.py llama --layers 2 --width 512 --vocabulary 4096 --steps 2 --warm-up 1)
"$engine" --version | tee "$out/status.txt"

profile() { # NAME LEAST-ROWS VERB COMMAND...
  local name=$1 least=$2 verb=$3 began=$SECONDS status=0 count found
  shift 3
  inside "$@" -o "$work/$name" -x --capture-range=cudaProfilerApi -- "${program[@]}" >"$work/log" 2>&1 || status=$?
  count=$(rows "$work/$name.sqlite" "$verb")
  found=$("$python" -m nvprof_kit "$verb" "$work/$name.sqlite" 2>/dev/null | sed -n 2,3p | tr '\n' ' ') || :
  if [ "$status" = 0 ] && [ "$count" -ge "$least" ]; then say "$name" yes "$((SECONDS - began)) s, $count rows: $found"
  else say "$name" NO "status $status, $count rows: $(tail -3 "$work/log")"; fi
}

profile profile 20 layers "$python" -m nvprof_kit profile
profile metrics 20 metrics "$python" -m nvprof_kit profile --preset metrics

seen=$(GPUS=0 inside "$python" -c 'import torch; print(torch.cuda.device_count())' 2>"$work/log") || :
here=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$seen" = 1 ]; then say one-gpu yes "1 of $here"; else say one-gpu NO "sees '$seen' of $here: $(tail -3 "$work/log")"; fi
seen=$(inside "$python" -c 'import torch; print(torch.cuda.device_count())' 2>"$work/log") || :
if [ "$seen" = "$here" ] && [ "$here" -gt 0 ]; then say all-gpus yes "$seen of $here"; else say all-gpus NO "sees '$seen' of $here: $(tail -3 "$work/log")"; fi

began=$SECONDS status=0
inside "$python" -m nvprof_kit ncu profile -k 'nvjet|gemm' -x --launch-count=2 -s tensor -x --profile-from-start=off -o "$work/kernels" -- "${program[@]}" >"$work/log" 2>&1 ||
  status=$?
count=$(grep -c '^"[0-9]' "$work/kernels.csv" 2>/dev/null) || count=0
if [ "$status" = 0 ] && [ "$count" = 2 ]; then say ncu yes "$((SECONDS - began)) s: $count kernels measured"
else say ncu NO "status $status, $count kernels: $(tail -3 "$work/log")"; fi

status=0
inside bash -c 'exit 7' >"$work/log" 2>&1 || status=$?
if [ "$status" = 7 ]; then say status yes "$status"; else say status NO "$status: $(tail -3 "$work/log")"; fi
exit $failed
