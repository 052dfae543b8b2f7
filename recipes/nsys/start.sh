#!/usr/bin/env bash
# Begin a capture of the program that launch.sh started.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: start.sh [OPTION]...

Begin a capture in the session of launch.sh; stop.sh ends it and leaves NAME.nsys-rep and NAME.sqlite.

Options:
  -s, --session NAME  name of the session (default: nvprof_kit)
  -o, --output NAME   name of the report without its suffix (default: SESSION.1, or the next number that is free)
  -f, --force         overwrite NAME.nsys-rep and NAME.sqlite
  -p, --preset NAME   the preset that launch.sh was given (default: train)
  -x, --nsys OPTION   one more option for nsys start, as it stands; may be given again
      --min-free MB   refuse to start with less disk left (default: 1024)
  -n, --dry-run       print the command and run nothing
  -h, --help          print this and exit

Exit status: 0 when the capture runs; 2 for a wrong call, an existing report or no such session, 3 where there is no nsys.
HELP
}

session=nvprof_kit output='' preset=train force='' min_free=1024 dry_run='' extra=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    -f | --force) force=yes ;;
    -n | --dry-run) dry_run=yes ;;
    -s | --session | -o | --output | -p | --preset | -x | --nsys | --min-free)
      need_value "$1" $#
      case $1 in
        -s | --session) session=$2 ;;
        -o | --output) output=$2 ;;
        -p | --preset) preset=$2 ;;
        -x | --nsys) extra+=("$2") ;;
        --min-free) need_number "$1" "$2"; min_free=$2 ;;
      esac
      shift ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
    *) fail 2 "no option $1; see start.sh --help" ;;
  esac
  shift
done
need_session_name "$session"

number=1
while [ -z "$output" ]; do
  [ -e "$session.$number.nsys-rep" ] || [ -e "$session.$number.sqlite" ] || output=$session.$number
  number=$((number + 1))
done
output=${output%.nsys-rep}
need_name "$output"
stage=$(stage_of "$output")

read_preset "$preset"
fit_settings start launch
for option in "${extra[@]}"; do
  case $option in --*=*) add_extra start "$option" ;; *) settings+=("$option") ;; esac
done
command=("$nsys" start "--session=$session" "${settings[@]}" --export=sqlite "--output=$stage/${output##*/}")
if [ -n "$dry_run" ]; then
  print_command "${command[@]}"
  exit 0
fi

need_nsys
refuse_existing "$force" "$output".{nsys-rep,sqlite}
case $(session_state "$session") in
  '') fail 2 "no session $session; start the program with launch.sh, and see status.sh" ;;
  *Collection*) fail 2 "session $session captures already; end that with stop.sh -s $session" ;;
esac
check_disk "$(dirname -- "$stage")" "$min_free"
open_stage "$stage" "$force"
folder=$(CDPATH='' cd -- "$(dirname -- "$stage")" && pwd)/
state=$(state_file "$session")
{ mkdir -p "${state%/*}" && printf '%s\n' "$folder${stage##*/}" "$folder" "$force" >"$state"; } 2>/dev/null || {
  rm -rf -- "$stage"
  fail 2 "cannot write $state, where stop.sh looks; set XDG_RUNTIME_DIR to a folder that can be written to"
}
"${command[@]}" || {
  status=$?
  rm -rf -- "$stage" "$state"
  fail "$status" "nsys did not start the capture"
}
note "session $session captures into $output; end it with stop.sh"
