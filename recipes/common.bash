# Shared by the recipes of both folders: messages, options, where a report goes, and a run under supervision.
# shellcheck shell=bash
# Sourced by nsys/common.bash and ncu/common.bash, never run.

me=${0##*/}

fail() { # STATUS MESSAGE
  printf '%s: %s\n' "$me" "$2" >&2
  exit "$1"
}

note() { # MESSAGE
  printf '%s: %s\n' "$me" "$1" >&2
}

# older ones take an empty list for an unset variable
[[ ${BASH_VERSINFO[0]}${BASH_VERSINFO[1]} -ge 44 ]] || fail 3 "needed bash 4.4 or newer, this is $BASH_VERSION"

set +o posix # a mode, from POSIXLY_CORRECT, in which the status of a process that has ended is told once only

need_value() { # OPTION NUMBER-OF-WORDS
  [ "$2" -ge 2 ] || fail 2 "$1 needs a value; see $me --help"
}

need_number() { # OPTION VALUE
  [[ $2 =~ ^[0-9]{1,12}$ ]] || fail 2 "$1 needs a whole number, not '$2'"
}

one_of() { # OPTION VALUE CHOICE...
  local choice
  for choice in "${@:3}"; do [ "$2" != "$choice" ] || return 0; done
  fail 2 "$1 is one of ${*:3}, not '$2'"
}

need_tool() { # NAME COMMAND PRODUCT VARIABLE
  local said
  command -v "$2" >/dev/null || fail 3 "no $1: '$2' is not found; install $3 and put its folder on PATH, or set $4"
  said=$("$2" --version 2>&1) || fail 3 "$2 does not run: ${said##*$'\n'}"
}

need_program() { # PROGRAM
  [ -n "$(type -P -- "$1")" ] || fail 127 "'$1' is not found, or is no program that can be run"
}

first_number() { # VARIABLE...; the value of the first that is set to a number
  local variable
  for variable in "$@"; do
    case ${!variable-} in '' | *[!0-9]*) ;; *) echo "$((10#${!variable}))"; return ;; esac
  done
}

# Sets `rank` to the number that a launcher gave this process.
find_rank() {
  # Slurm's last: whatever a batch script starts has its number, 0, in the environment
  rank=$(first_number RANK OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK SLURM_PROCID)
  [ -n "$rank" ] || fail 2 "no rank is known: none of RANK, OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK, SLURM_PROCID is set; \
start it through torchrun, accelerate, deepspeed, srun or mpirun"
}

print_command() { # WORD...; one line that can be pasted
  local word line=
  for word in "$@"; do
    case $word in '' | *[!A-Za-z0-9_./,:=@%+-]*) word=${word@Q} ;; esac
    line+=${line:+ }$word
  done
  printf '%s\n' "$line"
}

# --- where a report goes ---

check_disk() { # FOLDER, there or not yet; MEGABYTES
  local folder=$1 free
  until [ -d "$folder" ]; do folder=$(dirname -- "$folder"); done
  # the number before the percentage: names may have spaces, and file systems that cannot tell have no percentage
  free=$(df -Pm -- "$folder" 2>/dev/null | sed -n '2s/.* \([0-9][0-9]*\)  *[0-9]*% .*/\1/p') || free=''
  [ -z "$free" ] || [ "$free" -ge "$2" ] ||
    fail 2 "$folder has $free MB left and a report may need more; needed $2 MB: free some, or lower it with --min-free MB"
}

need_name() { # NAME of the report
  case ${1##*/} in '' | . | ..) fail 2 "-o '$1': needed a report's name, not a folder's" ;; esac
  # nsys writes the path as it is into the XML that its exporter reads
  case $PWD/$1 in *[\"\&[:cntrl:]]*) fail 2 "-o ${1@Q} in ${PWD@Q}: nsys cannot export to a path with \", & or a line break" ;; esac
}

refuse_existing() { # FORCE FILE...
  local file
  for file in "${@:2}"; do
    [ ! -d "$file" ] || fail 2 "$file is a folder; choose another name with -o NAME"
    [ -n "$1" ] || [ ! -e "$file" ] ||
      fail 2 "$file exists; choose another name with -o NAME, or overwrite it with --force"
  done
}

# A report is written into a folder of its own beside it; only what is whole leaves that. So a run that is killed at any
# moment leaves nothing that could be taken for a report.
stage_of() { # NAME of the report, %h and the like included
  local name=${1##*/}
  printf '%s' "$(folder_of "$1").${name//%/_}.partial"
}

folder_of() { # NAME of the report; nothing for this folder, else with a slash behind; a name is never taken for an option
  case $1 in */*) printf '%s/' "${1%/*}" ;; -*) printf './' ;; esac
}

open_stage() { # STAGE FORCE
  local folder
  folder=$(dirname -- "$1")
  [ -z "$2" ] || rm -rf -- "$1"
  mkdir -p -- "$folder" 2>/dev/null || fail 2 "$folder: cannot make this folder"
  mkdir -- "$1" 2>/dev/null && return 0
  [ -e "$1" ] || fail 2 "$folder: cannot write to this folder"
  fail 2 "$1 exists: a run writes there now, or was killed; take what you need and remove it, or use --force"
}

publish() { # STAGE FOLDER FORCE
  local file target shown=()
  for file in "$1"/*; do
    [ -e "$file" ] || continue
    target=$2${file##*/}
    if [ -e "$target" ] && [ -z "$3" ]; then
      note "$target exists; the new one stays in $1"
    else
      mv -fT -- "$file" "$target" || { note "cannot write $target; it stays in $1"; continue; }
      shown+=("$target")
    fi
  done
  rmdir -- "$1" 2>/dev/null || :
  if [ ${#shown[@]} -gt 0 ]; then
    note "wrote ${shown[*]}"
  else
    note "no report: nothing was captured"
  fi
}

# --- a run under supervision ---

# Runs a profiler and waits for it. Signals reach it once, which ends the program and still writes the report: SIGINT and
# SIGTERM as they are, SIGHUP (a lost terminal) as SIGTERM, since nsys would die of it and leave the program behind.
# Sets `status` to what it gave, which is the program's own.
supervise() { # WORD...
  local child signals=0 began=$SECONDS
  NVPROF_KIT_RUN=$$.$(date +%s%N)
  export NVPROF_KIT_RUN
  set -m # a process group of its own: Ctrl-C comes to this script only
  # 3 may be a log of the recipe's, which would not end while the program's children have it open
  if [ -t 0 ]; then "$@" </dev/null 3>&- & else "$@" <&0 3>&- & fi
  child=$!
  set +m
  # shellcheck disable=SC2064  # the child's number as it is now
  trap "pass_on INT $child" INT
  # shellcheck disable=SC2064
  trap "pass_on TERM $child" TERM HUP
  while kill -0 "$child" 2>/dev/null; do # a signal ends the waiting, and it may be at work still
    wait "$child" || :
  done
  # shellcheck disable=SC2034  # the recipes read it
  { status=0 && wait "$child"; } || status=$?
  trap - INT TERM HUP
}

# A launcher ends the other ranks when one fails, and they may have ended by then: their reports would not be written.
# So a first signal that finds the program gone is kept from it, unless the program may not have begun yet.
pass_on() { # SIGNAL CHILD
  signals=$((signals + 1))
  if [ "$signals" -gt 1 ] || [ $((SECONDS - began)) -lt 3 ] || program_runs; then
    kill "-$1" "$2" 2>/dev/null || :
  else
    note "the program has ended and its report is being written; a second signal stops that"
  fi
}

program_runs() {
  local process name
  for process in $(orphans); do
    name=$(cat "/proc/$process/comm" 2>/dev/null) || continue
    case $name in nsys* | Qdstrm* | ncu* | cat | sleep) ;; *) return 0 ;; esac
  done
  return 1
}

# Ends whatever a killed profiler left running: the program, its children, and the profiler's own agent. They are known by the
# environment they got from here.
end_orphans() {
  local patience signal
  for signal in 0 TERM KILL; do
    for patience in 1 2 3 4 5 6 7 8 9 10; do
      [ -n "$(orphans)" ] || return 0
      [ "$patience" -ne 1 ] || [ "$signal" = 0 ] || orphans | xargs -r kill "-$signal" 2>/dev/null || :
      sleep 0.2
    done
  done
}

orphans() { # the running processes that got this run's environment
  local process
  while IFS=/ read -r _ _ process _; do
    case $(sed -n 's/^State:\t\(.\).*/\1/p' "/proc/$process/status" 2>/dev/null) in Z | '') ;; *) echo "$process" ;; esac
  done < <(grep -lzFx -- "NVPROF_KIT_RUN=$NVPROF_KIT_RUN" /proc/[0-9]*/environ 2>/dev/null)
}
