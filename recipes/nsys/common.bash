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

# --- the run ---

# Prints a command that leaves a report; nsys would write to /tmp where its folder is missing.
print_capture() { # WORD...; uses `output`
  local folder
  folder=$(folder_of "$output")
  [ -z "$folder" ] || [ -d "$folder" ] || printf '%s && ' "$(print_command mkdir -p -- "${folder%/}")"
  print_command "$@"
}

# Sets `wrapped` to the program below program.bash, which gives it its own output and TMPDIR back and tells its process.
wrap_program() { # PROGRAM...
  # these end, with 0, before a program that handles the signal they pass on
  ! [[ $("$nsys" --version 2>/dev/null) =~ \ 20(1[0-9]|2[0-3])\. ]] || how=stay
  exec {own_output}>&1 {own_errors}>&2
  # shellcheck disable=SC2034  # the recipes read it
  wrapped=(bash "$here/program.bash" "$run" "$$" "$own_output" "$own_errors" "${TMPDIR-}" "$how" "$@")
}

# Runs nsys with its own words through `relay`.
supervise_nsys() { # STAGE WORD...
  local relaying patience
  exec {words}> >(trap '' INT TERM HUP && relay "$1")
  relaying=$!
  supervise become_nsys "${@:2}"
  exec {words}>&-
  for patience in 1 2 3 4 5 6 7 8 9 10; do # what nsys left running might have it open
    kill -0 "$relaying" 2>/dev/null || break
    sleep "0.$patience"
  done
}

become_nsys() { # WORD...
  [ -n "$leave_running$leave_spool" ] || export TMPDIR="$run" # nsys spools there; the user's may be small
  exec "$@" >&"$words" 2>&1 {words}>&-
}

# Whether nsys lost its own agent, as it does once in some thousand runs, before it began the program.
lost_its_agent() { # STAGE
  [ -e "$1/.lost" ] && rm -f -- "$1/.lost" && [ ! -s "$run/pid" ] && [ ! -s "$run/end" ]
}

leave_spool=''       # whether nsys keeps the user's TMPDIR
ends_with_capture='' # whether the program is to end with the capture

# What nsys says, without its progress and the names of files that are moved.
relay() { # STAGE, or another folder
  local line stage_path
  stage_path=$(CDPATH='' cd -P -- "$1" && pwd -P)
  while IFS= read -r line || [ -n "$line" ]; do
    line=${line//$'\r'/}
    case $line in
      '' | '['[0-9]*'/'[0-9]*']'* | Generated: | 'Collecting data...' | 'Processing ['* | 'Processing events...') ;;
      'Capture range '* | 'Initiating '* | 'The target application '* | 'Exporting '* | 'Saved '* | 'Saving '*) ;;
      "Generating '"*)
        [ -z "$ends_with_capture" ] || tell_program TERM || :
        note "the capture has ended, its report is being written" ;;
      *[![:space:]]*)
        case ${line#"${line%%[![:space:]]*}"} in
          "$stage_path"/*) continue ;;
          'End of file'* | *'Connection to the Agent lost'*) : >"$1/.lost" ;;
        esac
        line=${line//"$stage_path/"/}
        if [ -n "$quiet" ]; then printf '%s\n' "$line" >>"$1/.said"; else printf '%s\n' "$line" >&2; fi ;;
    esac
  done
}


# --- when a report is whole, and what is in it ---

# Brings the report to its place, or leaves it where it is and says so. What captured nothing is a failure: `status` is 1 then
# unless the program's own tells of another.
finish() { # STAGE FOLDER FORCE WHAT-NEVER-BEGAN
  local report reports=() empty=''
  [ "$status" -eq 0 ] || [ ! -s "$1/.said" ] || cat -- "$1/.said" >&2
  rm -f -- "$1/.said" "$1/.lost"
  [ -z "$run" ] || rm -rf -- "$run"
  [ "$status" -lt 128 ] || case $status in 129 | 130 | 143) ;; *) prove "$1" || return 0 ;; esac
  for report in "$1"/*.nsys-rep; do
    [ -e "$report" ] || continue
    reports+=("$report")
    [ -e "${report%.nsys-rep}.sqlite" ] ||
      warn "nsys did not export ${report##*/}, see what it said above; again: nsys export --type=sqlite ${report##*/}"
    ! holds_nothing "${report%.nsys-rep}.sqlite" || empty=yes
  done
  publish "$1" "$2" "$3"
  if [ ${#reports[@]} -eq 0 ]; then
    warn "no report: nothing was captured${4:+: $4}"
  elif [ -n "$empty" ]; then
    warn "nothing was captured: the report has no range and no CUDA call; was the model annotated (annotate_model), and did \
it use the GPU?"
  else
    for report in "${published[@]}"; do
      case $report in *.sqlite) say_next nvprof-kit layers "$report"; break ;; esac
    done
    return 0
  fi
  status=$((status ? status : 1))
}

# Whether an export has none of what nsys can trace; asks nothing where there is no python3.
holds_nothing() { # FILE
  [ -e "$1" ] && command -v python3 >/dev/null || return 1
  python3 -S - "$1" 2>/dev/null <<'PYTHON'
import sqlite3, sys
from urllib.parse import quote
db = sqlite3.connect(f"file:{quote(sys.argv[1])}?mode=ro&immutable=1", uri=True)
tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
what = [name for name in tables if name.startswith(("CUPTI_", "CUDNN_", "CUBLAS_", "OSRT_", "MPI_", "OPENMP", "NCCL"))]
what += tables & {"GPU_METRICS", "COMPOSITE_EVENTS", "SCHED_EVENTS", "GENERIC_EVENTS"}
asked = [f'SELECT 1 FROM "{name}" LIMIT 1' for name in what if not name.startswith("CUPTI_ACTIVITY_KIND_OVERHEAD")]
if "NVTX_EVENTS" in tables:
    asked.append("SELECT 1 FROM NVTX_EVENTS WHERE eventType IN (34, 59, 60, 70, 71) LIMIT 1")
sys.exit("StringIds" not in tables or any(db.execute(sql).fetchone() for sql in asked))
PYTHON
}

# Something was killed, the program or nsys itself: only a report that exports anew is whole.
prove() { # STAGE
  local report whole=yes
  for report in "$1"/*.nsys-rep; do
    [ -e "$report" ] || continue
    "$nsys" export --type=sqlite --force-overwrite=true "--output=${report%.nsys-rep}.sqlite" "$report" >/dev/null 2>&1 ||
      whole=
  done
  [ -n "$whole" ] || warn "nsys was killed while it wrote; what there is of the report stays in $1"
  [ -n "$whole" ]
}

# --- named sessions ---

need_session_name() { # NAME
  [[ $1 =~ ^[A-Za-z][A-Za-z0-9_-]{0,126}$ ]] || fail 2 "a session's name is letters, digits, _ and -, a letter first; not '$1'"
}

session_state() { # NAME; its line in nsys's list, nothing where there is no such session
  "$nsys" sessions list 2>/dev/null | awk -v name="$1" '$NF == name'
}

# Where start.sh leaves for stop.sh what it captures into: a folder of the user's own that no variable moves, since the two may
# be called from an ssh session and from a batch job.
state_file() { # NAME
  printf '%s' "/tmp/nvprof_kit-$UID/$(uname -n)-$1.capture"
}

need_state_folder() {
  local folder=/tmp/nvprof_kit-$UID
  (umask 077 && mkdir -p -- "$folder") 2>/dev/null || :
  [ -d "$folder" ] && [ -O "$folder" ] && [ ! -L "$folder" ] && [ -w "$folder" ] ||
    fail 2 "cannot write to $folder, where $(named stop) looks for what $(named start) captures into"
}
