#!/usr/bin/env bash
# Profile one program from its start to its end with nsys, so that `nvprof-kit layers` can tell which layer costs what.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: profile.sh [OPTION]... -- PROGRAM [ARGUMENT]...

Run PROGRAM under `nsys profile` and leave NAME.nsys-rep, for the Nsight Systems GUI, and NAME.sqlite, for nvprof-kit:

  profile.sh -- python train.py
  nvprof-kit layers run.sqlite

Options:
  -o, --output NAME   name of the report without its suffix (default: run); nsys's %h, %p and %q{VARIABLE} work in it
  -f, --force         overwrite NAME.nsys-rep and NAME.sqlite
  -t, --trace LIST    what nsys traces (default: cuda,nvtx); what is left out is not in the table
      --step N        capture step N alone, the stretch inside nvprof_kit.step(N); the program runs to its end
      --delay S       begin the capture S seconds after the program's start
      --duration S    end the capture after S seconds, and the program with it (SIGTERM)
      --keep-running  with --duration: let the program run on; this script then returns at once, with 0
  -x, --nsys OPTION   one more option for nsys profile, as it stands: -x --gpu-metrics-device=all; may be given again
  -n, --dry-run       print the command and run nothing
  -h, --help          print this and exit

Environment:
  NSYS                the nsys to run (default: nsys on PATH)

Exit status: the program's own; 2 for a wrong call or an existing report, 3 where there is no nsys.
HELP
}

fail() {
  printf 'profile.sh: %s\n' "$2" >&2
  exit "$1"
}

output=run trace=cuda,nvtx step='' delay='' duration='' force='' dry_run='' keep_running=''
extra=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    -f | --force) force=yes ;;
    -n | --dry-run) dry_run=yes ;;
    --keep-running) keep_running=yes ;;
    -o | --output | -t | --trace | --step | --delay | --duration | -x | --nsys)
      [ $# -ge 2 ] || fail 2 "$1 needs a value; see profile.sh --help"
      case $1 in
        -o | --output) output=$2 ;;
        -t | --trace) trace=$2 ;;
        --step) step=$2 ;;
        --delay) delay=$2 ;;
        --duration) duration=$2 ;;
        -x | --nsys) extra+=("$2") ;;
      esac
      shift ;;
    --*=*) # --output=NAME is --output NAME
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      continue ;;
    --) shift; break ;;
    -*) fail 2 "no option $1; see profile.sh --help" ;;
    *) fail 2 "the program comes after --: profile.sh [OPTION]... -- $*" ;;
  esac
  shift
done
[ $# -gt 0 ] || fail 2 "no program to run; needed: profile.sh [OPTION]... -- python train.py"
case $step in *[!0-9]*) fail 2 "--step needs a step's number, not '$step'" ;; esac
[ -z "$step" ] || [ -z "$delay$duration" ] || fail 2 "--step goes without --delay and --duration: the step says when"
[ -z "$keep_running" ] || [ -n "$duration" ] || fail 2 "--keep-running is of use only with --duration S"

output=${output%.nsys-rep}
nsys=${NSYS:-nsys}
command=("$nsys" profile "--trace=$trace")
case ,$trace, in
  # kernels of a replayed CUDA graph one by one: only so can each be given to its layer
  *,cuda,*) command+=(--cuda-graph-trace=node) ;;
esac
# no CPU samples and no context switches: the table needs neither, and both cost the program time
command+=(--sample=none --cpuctxsw=none)
[ -z "$step" ] ||
  command+=(--capture-range=nvtx "--nvtx-capture=step $step@nvprof_kit" --capture-range-end=stop)
[ -z "$delay" ] || command+=("--delay=$delay")
[ -z "$duration" ] || command+=("--duration=$duration")
[ -z "$keep_running" ] || command+=(--kill=none)
command+=("${extra[@]}" --export=sqlite "--output=$output")
[ -z "$force" ] || command+=(--force-overwrite=true)
command+=("$@")

if [ -n "$dry_run" ]; then
  line=
  for word in "${command[@]}"; do
    case $word in '' | *[!A-Za-z0-9_./,:=@%+-]*) word=${word@Q} ;; esac
    line+=${line:+ }$word
  done
  printf '%s\n' "$line"
  exit 0
fi

command -v "$nsys" >/dev/null ||
  fail 3 "no nsys: '$nsys' is not found; install Nsight Systems and put its bin folder on PATH, or set NSYS"
if [ -z "$force" ]; then
  # nsys itself would notice only after the run, and put the report into /tmp
  for file in "$output.nsys-rep" "$output.sqlite"; do
    [ ! -e "$file" ] || fail 2 "$file exists; choose another name with -o NAME, or overwrite it with --force"
  done
fi
exec "${command[@]}"
