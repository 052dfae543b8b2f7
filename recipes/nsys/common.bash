# Shared by the recipes of this folder: messages, presets, the options of the nsys at hand, and a run under supervision.
# shellcheck shell=bash
# Sourced, never run. A recipe sets its options and calls these functions.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nsys=${NSYS:-nsys}
me=${0##*/}

fail() { # STATUS MESSAGE
  printf '%s: %s\n' "$me" "$2" >&2
  exit "$1"
}

note() { # MESSAGE
  printf '%s: %s\n' "$me" "$1" >&2
}

need_value() { # OPTION NUMBER-OF-WORDS
  [ "$2" -ge 2 ] || fail 2 "$1 needs a value; see $me --help"
}

need_number() { # OPTION VALUE
  case $2 in '' | *[!0-9]*) fail 2 "$1 needs a whole number, not '$2'" ;; esac
}

need_nsys() {
  command -v "$nsys" >/dev/null ||
    fail 3 "no nsys: '$nsys' is not found; install Nsight Systems and put its bin folder on PATH, or set NSYS"
}

print_command() { # WORD...; one line that can be pasted
  local word line=
  for word in "$@"; do
    case $word in '' | *[!A-Za-z0-9_./,:=@%+-]*) word=${word@Q} ;; esac
    line+=${line:+ }$word
  done
  printf '%s\n' "$line"
}

# --- settings: an array of nsys options ---

settings=()

read_preset() { # NAME, or a file
  local file=$1 line presets
  [ -f "$file" ] || file=$here/presets/$1
  if [ ! -f "$file" ]; then
    presets=("$here"/presets/*)
    fail 2 "no preset '$1'; there are: ${presets[*]##*/}"
  fi
  while IFS= read -r line || [ -n "$line" ]; do
    line=${line%%#*}
    line=${line%"${line##*[![:space:]]}"}
    case $line in
      '') ;;
      --*=*) settings+=("$line") ;;
      *) fail 2 "$file: '$line' is no --option=value" ;;
    esac
  done <"$file"
}

trace_only() { # LIST; what else the preset says about CUDA goes where CUDA is not traced
  local kept=() option
  for option in "${settings[@]}"; do
    case $option,$1, in
      --trace=*) kept+=("--trace=$1") ;;
      --cuda*,*cuda,*) kept+=("$option") ;;
      --cuda*) ;;
      *) kept+=("$option") ;;
    esac
  done
  settings=("${kept[@]}")
}

# --- the nsys at hand: its options differ from release to release, so its help is asked ---

declare -A nsys_help=()

read_help() { # VERB...; fails where there is no nsys to ask
  local verb
  command -v "$nsys" >/dev/null || return 1
  for verb in "$@"; do
    # an option marked (Deprecated) is in the help and refused all the same
    [ -n "${nsys_help[$verb]-}" ] || nsys_help[$verb]=$("$nsys" "$verb" --help 2>&1 | grep -v '(Deprecated)') || :
    [ -n "${nsys_help[$verb]}" ] || return 1
  done
}

has_option() { # VERB NAME
  [[ ${nsys_help[$1]} =~ (^|[[:space:],])--$2= ]]
}

# the names that an option has had, oldest and newest release last
aliases() { # NAME
  case $1 in
    gpu-metrics-device | gpu-metrics-devices) echo gpu-metrics-devices gpu-metrics-device ;;
    python-functions-trace | python-nvtx-annotations) echo python-functions-trace python-nvtx-annotations ;;
    event-sampling-interval | event-sampling-frequency) echo event-sampling-interval ;;
    *) echo "$1" ;;
  esac
}

# Sets `settings` to those that this nsys has, under the names it has for them. What another of the VERBS takes is left
# to that one; what none takes is left out with a note. Without an nsys nothing is changed.
fit_settings() { # VERB [OTHER-VERB]...
  local option verb renamed fitted=()
  read_help "$@" || return 0
  for option in "${settings[@]}"; do
    for verb in "$@"; do
      renamed=$(name_in "$verb" "$option") && break
    done
    if [ -z "$renamed" ]; then
      note "this nsys has no ${option%%=*}: left out"
    elif [ "$verb" = "$1" ]; then
      fitted+=("$renamed")
    fi
  done
  settings=("${fitted[@]}")
}

# Adds what the user asked for in nsys's own words, in place of a setting of the same name.
add_extra() { # VERB OPTION
  local renamed=$2 option kept=()
  if read_help "$1"; then renamed=$(name_in "$1" "$2") || renamed=$2; fi
  for option in "${settings[@]}"; do
    [ "${option%%=*}" = "${renamed%%=*}" ] || kept+=("$option")
  done
  settings=("${kept[@]}" "$renamed")
}

# The option under the name that this nsys has for it; fails where it has none.
name_in() { # VERB --NAME=VALUE
  local name=${2%%=*}
  for name in $(aliases "${name#--}"); do
    if has_option "$1" "$name"; then
      printf '%s' "--$name=${2#*=}"
      return 0
    fi
  done
  return 1
}

# --- where a report goes ---

check_disk() { # FOLDER, there or not yet; MEGABYTES
  local folder=$1 free
  until [ -d "$folder" ]; do folder=$(dirname "$folder"); done
  free=$(df -Pm "$folder" 2>/dev/null | awk 'NR == 2 { print $4 }')
  [ -z "$free" ] || [ "$free" -ge "$2" ] ||
    fail 2 "$folder has $free MB left and a report may need more; needed $2 MB: free some, or lower it with --min-free MB"
}

refuse_existing() { # NAME FORCE
  local file
  for file in "$1.nsys-rep" "$1.sqlite"; do
    [ -n "$2" ] || [ ! -e "$file" ] ||
      fail 2 "$file exists; choose another name with -o NAME, or overwrite it with --force"
  done
}

# nsys writes into a folder of its own beside the report; only what is whole leaves it. So a run that is killed at any
# moment leaves nothing that could be taken for a report.
stage_of() { # NAME of the report, %h and the like included
  local folder=${1%/*} name=${1##*/}
  [ "$folder" != "$1" ] || folder=.
  [ "$folder" = . ] && folder='' || folder+=/
  printf '%s' "$folder.${name//%/_}.partial"
}

open_stage() { # STAGE FORCE
  [ -z "$2" ] || rm -rf -- "$1"
  mkdir -p -- "$(dirname "$1")" || fail 2 "$(dirname "$1"): cannot make this folder"
  mkdir -- "$1" 2>/dev/null ||
    fail 2 "cannot make $1; if it exists, a run writes there now or was killed: take what you need and remove it, or use --force"
}

publish() { # STAGE FOLDER FORCE STATUS
  local file target shown=()
  [ "$4" -lt 128 ] || case $4 in 129 | 130 | 143) ;; *) prove "$1" || return 0 ;; esac
  for file in "$1"/*; do
    [ -e "$file" ] || continue
    target=$2${file##*/}
    if [ -e "$target" ] && [ -z "$3" ]; then
      note "$target exists; the new one stays in $1"
    else
      mv -f -- "$file" "$target"
      shown+=("$target")
    fi
  done
  rmdir -- "$1" 2>/dev/null || :
  if [ ${#shown[@]} -gt 0 ]; then
    note "wrote ${shown[*]}"
  else
    note "no report: nsys captured nothing"
  fi
}

# Something was killed, the program or nsys itself: only a report that exports anew is whole.
prove() { # STAGE
  local report whole=yes
  for report in "$1"/*.nsys-rep; do
    [ -e "$report" ] || continue
    "$nsys" export --type=sqlite --force-overwrite=true "--output=${report%.nsys-rep}.sqlite" "$report" >/dev/null 2>&1 ||
      whole=
  done
  [ -n "$whole" ] || note "nsys was killed while it wrote; what there is of the report stays in $1"
  [ -n "$whole" ]
}

# --- named sessions ---

need_session_name() { # NAME
  [[ $1 =~ ^[A-Za-z][A-Za-z0-9_-]{0,126}$ ]] || fail 2 "a session's name is letters, digits, _ and -, a letter first; not '$1'"
}

session_state() { # NAME; its line in nsys's list, nothing where there is no such session
  "$nsys" sessions list 2>/dev/null | awk -v name="$1" '$NF == name'
}

state_file() { # NAME; where start.sh leaves for stop.sh what it captures into
  printf '%s' "${XDG_RUNTIME_DIR:-${HOME:-/tmp}/.cache}/nvprof_kit/$1.capture"
}

# --- a run under supervision ---

# Runs nsys and waits for it. Signals reach nsys once, which ends the program and still writes the report: SIGINT and
# SIGTERM as they are, SIGHUP (a lost terminal) as SIGTERM, since nsys would die of it and leave the program behind.
# Sets `status` to what nsys gave, which is the program's own.
supervise() { # WORD...
  local child signals=0 began=$SECONDS
  NVPROF_KIT_RUN=$$.$(date +%s%N)
  export NVPROF_KIT_RUN
  set -m # a process group of its own: Ctrl-C comes to this script only
  if [ -t 0 ]; then "$@" </dev/null & else "$@" <&0 & fi
  child=$!
  set +m
  # shellcheck disable=SC2064  # the child's number as it is now
  trap "pass_on INT $child" INT
  # shellcheck disable=SC2064
  trap "pass_on TERM $child" TERM HUP
  while :; do
    # shellcheck disable=SC2034  # the recipes read it
    { status=0 && wait "$child"; } || status=$?
    kill -0 "$child" 2>/dev/null || break # else a signal came, and nsys is at work still
  done
  trap - INT TERM HUP
}

# A launcher ends the other ranks when one fails, and they may have ended by then: nsys would stop writing their reports.
# So a first signal that finds the program gone is kept from it, unless the program may not have begun yet.
pass_on() { # SIGNAL CHILD
  signals=$((signals + 1))
  if [ "$signals" -gt 1 ] || [ $((SECONDS - began)) -lt 3 ] || program_runs; then
    kill "-$1" "$2" 2>/dev/null || :
  else
    note "the program has ended and nsys writes the report; a second signal stops it"
  fi
}

program_runs() {
  local process name
  for process in $(orphans); do
    name=$(cat "/proc/$process/comm" 2>/dev/null) || continue
    case $name in nsys* | Qdstrm* | cat | sleep) ;; *) return 0 ;; esac
  done
  return 1
}

# Ends whatever a killed nsys left running: the program, its children, and nsys's own agent. They are known by the
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
