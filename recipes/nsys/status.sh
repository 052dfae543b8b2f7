#!/usr/bin/env bash
# Which nsys sessions there are, what they do, and whether this machine lets nsys do all it can.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: status.sh [OPTION]...

List the nsys sessions of this machine and what each does. For a full examination there is `nvprof-kit doctor`.

Options:
  -e, --environment   also what nsys says about CPU sampling and the machine
  -n, --dry-run       print the commands and run nothing
  -h, --help          print this and exit

Exit status: 0; 2 for a wrong call, 3 where there is no nsys.
HELP
}

environment='' dry_run=''
option() { # NAME VALUE
  case $1 in
    environment) environment=yes ;;
    dry-run) dry_run=yes ;;
  esac
}

no_program=yes
take_options "$@"
if [ -n "$dry_run" ]; then
  print_command "$nsys" sessions list
  [ -z "$environment" ] || print_command "$nsys" status --environment
  exit 0
fi
need_nsys
"$nsys" sessions list
[ -z "$environment" ] || "$nsys" status --environment || : # it fails where it merely warns
