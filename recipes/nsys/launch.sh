#!/usr/bin/env bash
# Start a program under nsys without capturing anything yet: start.sh and stop.sh, from another terminal, capture
# stretches of it, as many as are wanted.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: launch.sh [OPTION]... -- PROGRAM [ARGUMENT]...

Run PROGRAM in a named nsys session; nothing is captured until start.sh says so, in another terminal:

  launch.sh -- python serve.py          # here
  start.sh; sleep 10; stop.sh           # there; leaves nvprof_kit.1.nsys-rep and .sqlite
  start.sh; sleep 10; stop.sh           # nvprof_kit.2

Options:
  -s, --session NAME  name of the session, a letter first (default: nvprof_kit)
  -p, --preset NAME   settings: train (default), infer, graphs, memory, metrics, light, or a file like those in presets/;
                      give start.sh the same
  -t, --trace LIST    what nsys traces instead of the preset's list
  -x, --nsys OPTION   one more option for nsys launch, as it stands; may be given again
  -n, --dry-run       print the command and run nothing
  -h, --help          print this and exit

Exit status: the program's own; 2 for a wrong call or a session that exists, 3 where there is no nsys, 127 no program.
HELP
}

session=nvprof_kit preset=train trace='' dry_run='' extra=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    -n | --dry-run) dry_run=yes ;;
    -s | --session | -p | --preset | -t | --trace | -x | --nsys)
      need_value "$1" $#
      case $1 in
        -s | --session) session=$2 ;;
        -p | --preset) preset=$2 ;;
        -t | --trace) trace=$2 ;;
        -x | --nsys) extra+=("$2") ;;
      esac
      shift ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
    --) shift; break ;;
    -*) fail 2 "no option $1; see launch.sh --help" ;;
    *) fail 2 "the program comes after --: launch.sh [OPTION]... -- $*" ;;
  esac
  shift
done
[ $# -gt 0 ] || fail 2 "no program to run; needed: launch.sh [OPTION]... -- python serve.py"
need_session_name "$session"

read_preset "$preset"
[ -z "$trace" ] || trace_only "$trace"
fit_settings launch start
for option in "${extra[@]}"; do
  case $option in --*=*) add_extra launch "$option" ;; *) settings+=("$option") ;; esac
done
command=("$nsys" launch "--session-new=$session" "${settings[@]}" "$@")
if [ -n "$dry_run" ]; then
  print_command "${command[@]}"
  exit 0
fi

need_nsys
need_program "$1"
[ -z "$(session_state "$session")" ] ||
  fail 2 "a session $session runs already; take another name with -s NAME, or end it: nsys shutdown --session=$session"
export NVPROF_KIT_RANK_MARK=step # a session misses the mark with which the program says at its begin which rank it is
supervise "${command[@]}"
[ "$status" -le 128 ] || end_orphans
exit "$status"
