# Between nsys and a program: tells the recipe its process, and gives the program what nsys's own is apart from.
# shellcheck shell=bash
# Started by nsys, never by hand: program.bash FOLDER RECIPE OUTPUT ERRORS TMPDIR HOW PROGRAM [ARGUMENT]...
#   FOLDER          where the recipe looks: `pid` and, when the program has ended, `status`; `end` says that it shall not begin
#   RECIPE          the recipe's process; OUTPUT and ERRORS are the descriptors of its own stdout and stderr
#   HOW             become: this process becomes the program; stay: it waits and leaves the status

run=$1 recipe=$2 output=$3 errors=$4 tmp=$5 how=$6
shift 6

# a release of nsys that closes what it does not know leaves the program nsys's own
if [ "/proc/self/fd/$output" -ef "/proc/$recipe/fd/$output" ]; then exec >&"$output"; fi
if [ "/proc/self/fd/$errors" -ef "/proc/$recipe/fd/$errors" ]; then exec 2>&"$errors"; fi
for descriptor in "$output" "$errors"; do eval "exec $descriptor>&-"; done 2>/dev/null

# nsys gives the program a session of its own; where it does not, reading from the terminal would stop it
if [ -t 0 ]; then
  read -r stat </proc/self/stat
  read -r _ _ group _ terminal front _ <<<"${stat##*) }"
  [ "$terminal" = 0 ] || [ "$group" = "$front" ] || exec </dev/null
fi

if [ -n "$tmp" ]; then export TMPDIR=$tmp; else unset TMPDIR; fi

begin() { # PROGRAM...
  printf '%s\n' "$BASHPID" >"$run/pid"
  if [ -s "$run/end" ]; then
    case $(<"$run/end") in INT) exit 130 ;; *) exit 143 ;; esac
  fi
  exec -- "$@"
}

case $how in
  stay)
    trap : INT TERM HUP # the program's to handle
    (begin "$@")
    status=$?
    { printf '%s\n' "$status" >"$run/status"; } 2>/dev/null # nobody may be waiting
    exit "$status" ;;
  *) begin "$@" ;;
esac
