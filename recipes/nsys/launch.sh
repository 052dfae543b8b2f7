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
                      give start the same
  -t, --trace LIST    what nsys traces instead of the preset's list
  -x, --nsys OPTION   additional option for nsys launch, passed unchanged; may be given again
      --annotate      annotate the model without changing the program, at the model's first call
  -q, --quiet         print only errors
  -n, --dry-run       print the command and run nothing
  -h, --help          print this and exit

Exit status: the program's own; 2 for a wrong call or a session that exists, 3 where there is no nsys, 127 no program.
HELP
}

session=nvprof_kit preset=train trace='' dry_run='' extra=()
option() { # NAME VALUE
  case $1 in
    session) session=$2 ;;
    preset) preset=$2 ;;
    trace) trace=$2 ;;
    nsys) extra+=("$2") ;;
    annotate) needed=$(annotation); mapfile -t -O ${#environment[@]} environment <<<"$needed" ;;
    quiet) quiet=yes ;;
    dry-run) dry_run=yes ;;
  esac
}

environment=()
take_options "$@"
[ ${#program[@]} -gt 0 ] || fail 2 "no program to run; needed: $me [OPTION]... -- python serve.py"
need_session_name "$session"

read_preset "$preset"
[ -z "$trace" ] || trace_only "$trace"
fit_settings launch start
for option in "${extra[@]}"; do
  case $option in --*=*) add_extra launch "$option" ;; *) settings+=("$option") ;; esac
done
launch=("$nsys" launch "--session-new=$session" "${settings[@]}")
if [ -n "$dry_run" ]; then
  print_command "${environment[@]}" "${launch[@]}" "${program[@]}"
  exit 0
fi

need_nsys
need_program "${program[0]}"
[ -z "$(session_state "$session")" ] ||
  fail 2 "a session $session runs already; take another name with -s NAME, or end it: nsys shutdown --session=$session"
export NVPROF_KIT_RANK_MARK=step # a session misses the mark with which the program says at its begin which rank it is
check_disk "${TMPDIR:-/tmp}" 1 # nsys spools there, whatever start.sh captures into
run=$(mktemp -d -- "${TMPDIR:-/tmp}/nvprof_kit.XXXXXXXX") || fail 3 "cannot write to ${TMPDIR:-/tmp}; set TMPDIR"
trap 'rm -rf -- "$run"' EXIT
leave_spool=yes # sessions are looked for there
[ ${#environment[@]} -eq 0 ] || export "${environment[@]}"
how=stay # stop.sh --shutdown ends it
wrap_program "${program[@]}"
supervise_nsys "$run" "${launch[@]}" "${wrapped[@]}"
{ [ "$status" -le 128 ] && [ -z "$left_early" ]; } || end_orphans
exit "$status"
