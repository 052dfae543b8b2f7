#!/usr/bin/env bash
# Run every nsys recipe on a machine with a GPU and say in a line each what it left. From the repository's root:
#   tests/gpu/check_recipes.sh FOLDER
# With two GPUs the ranks each have their own. Exits 1 if anything is not as it should be.
set -uo pipefail
out=${1:?usage: check_recipes.sh FOLDER}
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
kit=(python3 -m nvprof_kit)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
train=(python3 "$root/tests/gpu/programs/scheduled.py" --pause 0.05)
failed=0
cd "$out" || exit 2

say() { # NAME OK TEXT; adds to what is not well whether nsys could not import all events, by the log NAME.log
  local why=
  if [ "$2" != yes ]; then
    failed=1
    why=$(grep -hom1 'nsys could not import all events of the run: [^;]*' "${1/#rank */ranks}.log" 2>/dev/null)
  fi
  printf '%-16s %-3s %s\n' "$1" "$2" "$3${why:+; $why}" | tee -a summary.txt
}

steps_in() { # CAPTURE; the steps with kernels, and the number of operations
  python3 -m nvprof_kit layers "$1" --by step --steps all --format csv 2>/dev/null | python3 -c '
import csv, sys
rows = list(csv.DictReader(sys.stdin))
ops = {}
for row in rows:
    ops[row["step"]] = ops.get(row["step"], 0) + int(row["gpu_ops"])
print(",".join(sorted((step for step in ops if step not in ("", "-1") and ops[step]), key=float)), sum(ops.values()))'
}

profile() { # NAME STEPS OPTION...; profiles and compares the steps captured with a pattern
  local name=$1 want=$2 found
  shift 2
  "${kit[@]}" profile -f -o "$name" "$@" -- "${train[@]}" >"$name.log" 2>&1
  local status=$?
  found=$(steps_in "$name.sqlite")
  if [ $status -eq 0 ] && [[ $found =~ ^$want\ [1-9] ]]; then say "$name" yes "steps and operations: $found"
  else say "$name" NO "status $status, steps and operations: '$found', wanted $want; see $name.log"; fi
}

all=0,1,2,3,4,5,6,7,8,9,10,11
for preset in train infer graphs memory light metrics; do
  profile "$preset" "$all" --preset "$preset"
done
profile step 7 --step 7
profile schedule 4,5 --schedule 4:6
NVPROF_KIT_SCHEDULE=4:6 profile cuda-profiler 4,5 -x --capture-range=cudaProfilerApi
train+=(--pause 1)
"${kit[@]}" profile -f -o windows --schedule skip_first=2,active=2,wait=1,repeat=2 -- "${train[@]}" >windows.log 2>&1
first=$(steps_in windows.1.sqlite) second=$(steps_in windows.2.sqlite)
if [[ "$first;$second" =~ ^3,4\ [1-9].*\;6,7\ [1-9] ]]; then say windows yes "$first; $second"; else say windows NO "$first; $second"; fi

"${kit[@]}" session launch -s check -- "${train[@]}" --steps 40 >launch.log 2>&1 &
launched=$!
for _ in $(seq 60); do "${kit[@]}" session status | grep -q check && break; sleep 0.5; done
sleep 15
for _ in 1 2; do
  "${kit[@]}" session start -s check >>session.log 2>&1
  sleep 4
  "${kit[@]}" session stop -s check >>session.log 2>&1
done
"${kit[@]}" session stop -s check >>session.log 2>&1; nsys shutdown --session=check --kill=sigterm >>session.log 2>&1
wait $launched
first=$(steps_in check.1.sqlite) second=$(steps_in check.2.sqlite)
if [[ "$first;$second" =~ [0-9]\ [1-9].*\;.*[0-9]\ [1-9] ]]; then say session yes "$first; $second"; else say session NO "$first; $second; see session.log"; fi

gpus=$(nvidia-smi -L | wc -l)
[ "$gpus" -le 2 ] || gpus=2
rm -f rank-*
python3 -m torch.distributed.run "--nproc-per-node=$gpus" --no-python "${kit[@]}" ranks profile --ranks all -o rank --step 7 -- \
  "${train[@]}" --pause 0 >ranks.log 2>&1
for rank in $(seq 0 $((gpus - 1))); do
  reports=(rank-*-rank"$rank"-*.sqlite)
  found=$(steps_in "${reports[0]}")
  if [[ $found =~ ^7\ [1-9] ]]; then say "rank $rank" yes "$found"; else say "rank $rank" NO "$found; see ranks.log"; fi
done

began=$SECONDS
"${kit[@]}" profile -f -o interrupted -- "${train[@]}" --steps 1000 >interrupted.log 2>&1 &
running=$!
sleep 30
kill -TERM $running
wait $running
status=$?
found=$(steps_in interrupted.sqlite)
if [ $status -eq 143 ] && [ -n "$found" ]; then say interrupted yes "status 143 after $((SECONDS - began)) s, ${found##* } operations"
else say interrupted NO "status $status, '$found'; see interrupted.log"; fi

python3 -m nvprof_kit doctor -- "${train[@]}" >doctor.txt 2>&1
say doctor yes "$(tail -1 doctor.txt); see doctor.txt"
python3 -m nvprof_kit doctor train.sqlite >doctor-train.txt 2>&1
say doctor-capture yes "$(tail -1 doctor-train.txt); see doctor-train.txt"
python3 -m nvprof_kit scrub train.sqlite -o train-clean.sqlite 2>scrub.txt
if cmp <(python3 -m nvprof_kit layers train.sqlite --format csv 2>/dev/null) \
  <(python3 -m nvprof_kit layers train-clean.sqlite --format csv 2>/dev/null); then say scrub yes "$(cat scrub.txt)"; else say scrub NO "the tables differ"; fi
exit $failed
