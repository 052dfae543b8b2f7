# Shared by the recipes of this folder: presets, the options of the nsys at hand, sessions, and when a report is whole.
# shellcheck shell=bash
# Sourced, never run. A recipe sets its options and calls these functions and those of ../common.bash.

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../common.bash
. "$here/../common.bash"
nsys=${NSYS:-nsys}

need_nsys() {
  need_tool nsys "$nsys" "Nsight Systems" NSYS
}

# --- settings: an array of nsys options ---

settings=()

read_preset() { # NAME, or a file
  local file=$here/presets/$1 line presets
  case $1 in */*) file=$1 ;; esac
  [ -f "$file" ] || file=$1
  if [ ! -f "$file" ]; then
    presets=("$here"/presets/*)
    fail 2 "no preset '$1'; there are: ${presets[*]##*/}"
  fi
  [ -r "$file" ] || fail 2 "$file: no permission to read it"
  while IFS= read -r line || [ -n "$line" ]; do
    line=${line#"${line%%[![:space:]]*}"}
    case $line in '#'*) continue ;; esac
    line=${line%%[[:space:]]#*} # a value may have a # in it
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
  "$nsys" --version >/dev/null 2>&1 || return 1
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

# --- when a report is whole ---

# Brings the report to its place, or leaves it where it is and says so.
finish() { # STAGE FOLDER FORCE STATUS
  local report
  [ "$4" -lt 128 ] || case $4 in 129 | 130 | 143) ;; *) prove "$1" || return 0 ;; esac
  for report in "$1"/*.nsys-rep; do
    [ ! -e "$report" ] || [ -e "${report%.nsys-rep}.sqlite" ] ||
      note "nsys did not export ${report##*/}, see what it said above; again: nsys export --type=sqlite ${report##*/}"
  done
  publish "$1" "$2" "$3"
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
  printf '%s' "${XDG_RUNTIME_DIR:-${HOME:-${TMPDIR:-/tmp}/nvprof_kit-$UID}/.cache}/nvprof_kit/$1.capture"
}
