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
  -p, --preset NAME   the preset that launch was given (default: train)
  -x, --nsys OPTION   additional option for nsys start, passed unchanged; may be given again
      --min-free MB   refuse to start with less disk left, there and in TMPDIR (default: 1024)
  -q, --quiet         print only errors
  -n, --dry-run       print the command and run nothing
  -h, --help          print this and exit

Exit status: 0 when the capture runs; 2 for a wrong call, an existing report or no such session, 3 where there is no nsys.
HELP
}

session=nvprof_kit output='' preset=train force='' min_free=1024 dry_run='' extra=()
option() { # NAME VALUE
  case $1 in
    session) session=$2 ;;
    output) output=$2 ;;
    force) force=yes ;;
    preset) preset=$2 ;;
    nsys) extra+=("$2") ;;
    min-free) need_number "$given" "$2"; min_free=$2 ;;
    quiet) quiet=yes ;;
    dry-run) dry_run=yes ;;
  esac
}

no_program=yes
take_options "$@"
need_session_name "$session"

number=1
while [ -z "$output" ]; do
  [ -e "$session.$number.nsys-rep" ] || [ -e "$session.$number.sqlite" ] || output=$session.$number
  number=$((number + 1))
done
output=${output%.nsys-rep}
need_name "$output"

read_preset "$preset"
fit_settings start launch
for option in "${extra[@]}"; do
  case $option in --*=*) add_extra start "$option" ;; *) settings+=("$option") ;; esac
done
start=("$nsys" start "--session=$session" "${settings[@]}" --export=sqlite)
if [ -n "$dry_run" ]; then
  print_capture "${start[@]}" ${force:+--force-overwrite=true} "--output=$output"
  exit 0
fi
expand_name "$output"
need_name "$output"
stage=$(stage_of "$output")

need_nsys
refuse_existing "$force" "$output".{nsys-rep,sqlite}
case $(session_state "$session") in
  '') fail 2 "no session $session; start the program with $(named launch), and see $(named status)" ;;
  *Collection*) fail 2 "session $session captures already; end that with $(named stop) -s $session" ;;
esac
check_disk "$(dirname -- "$stage")" "$min_free"
check_disk "${TMPDIR:-/tmp}" "$min_free" # nsys spools there
need_state_folder
open_stage "$stage" "$force"
folder=$(CDPATH='' cd -- "$(dirname -- "$stage")" && pwd)/
state=$(state_file "$session")
name=${output##*/}
printf '%s\n' "$folder${stage##*/}" "$folder" "$force" >"$state"
"${start[@]}" "--output=$stage/${name//%/%%}" || {
  status=$?
  rm -rf -- "$stage" "$state"
  fail "$status" "nsys did not start the capture"
}
note "session $session captures into $output; end it with $(named stop)"
