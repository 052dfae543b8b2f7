#!/usr/bin/env bash
# End the capture that start.sh began, and write its report; the program runs on.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: stop.sh [OPTION]...

End the capture that start.sh began, and write its report. The program runs on, and start.sh may begin another.

Options:
  -s, --session NAME  name of the session (default: nvprof_kit)
      --shutdown      end the session too, and the program with it (SIGTERM)
  -q, --quiet         print only errors
  -n, --dry-run       print the commands and run nothing
  -h, --help          print this and exit

Exit status: 0 when the report is written; 1 where nothing was captured, 2 for a wrong call or no capture to end, 3 where there is no nsys.
HELP
}

session=nvprof_kit shutdown='' dry_run=''
option() { # NAME VALUE
  case $1 in
    session) session=$2 ;;
    shutdown) shutdown=yes ;;
    quiet) quiet=yes ;;
    dry-run) dry_run=yes ;;
  esac
}

no_program=yes
take_options "$@"
need_session_name "$session"
stop=("$nsys" stop "--session=$session")
end=("$nsys" shutdown "--session=$session" --kill=sigterm)
if [ -n "$dry_run" ]; then
  print_command "${stop[@]}"
  [ -z "$shutdown" ] || print_command "${end[@]}"
  exit 0
fi

need_nsys
state=$(state_file "$session")
running=$(session_state "$session")
if [ ! -f "$state" ]; then
  [ -n "$shutdown" ] && [ -n "$running" ] || fail 2 "no capture to end in session $session; begin one with $(named start)"
  exec "${end[@]}"
fi
{ IFS= read -r stage; IFS= read -r folder; IFS= read -r force; } <"$state"
status=0
if [[ $running == *Collection* ]]; then
  "${stop[@]}" 2>&1 | relay "$stage" || status=$? # with pipefail that of nsys
else
  note "session $session captures no more: its program ended" # and nsys wrote the report then
fi
rm -f -- "$state"
finish "$stage" "$folder" "$force" ""
[ -z "$shutdown" ] || [ -z "$running" ] || "${end[@]}"
exit "$status"
