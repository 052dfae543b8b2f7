# Shared by the recipes of ncu: messages, options, where a report goes, and a run under supervision.
# shellcheck shell=bash
# Sourced by ncu/common.bash, never run.

me=${NVPROF_KIT_VERB:-${0##*/}} # `nvprof-kit ncu profile`, say, which becomes layer.sh
unset NVPROF_KIT_VERB
quiet=''

fail() { # STATUS MESSAGE
  printf '%s: %s\n' "$me" "$2" >&2
  exit "$1"
}

warn() { # MESSAGE
  printf '%s: %s\n' "$me" "$1" >&2
}

note() { # MESSAGE, which --quiet leaves out
  [ -n "$quiet" ] || warn "$1"
}

# How this call's user calls another recipe: kernels.sh, or `nvprof-kit ncu profile` behind a verb.
named() { # NAME [WORDS of nvprof-kit]
  case $me in
    nvprof-kit\ *) printf 'nvprof-kit %s' "${2:-$1}" ;;
    *) printf '%s.sh' "$1" ;;
  esac
}

# older ones take an empty list for an unset variable
[[ ${BASH_VERSINFO[0]}${BASH_VERSINFO[1]} -ge 44 ]] || fail 3 "needed bash 4.4 or newer, this is $BASH_VERSION"

set +o posix # a mode, from POSIXLY_CORRECT, in which the status of a process that has ended is told once only

# Prints what --annotate adds to the program's environment, a line each: nvprof_kit annotates from a `sitecustomize`, which
# Python runs in the program and in every Python process below it.
annotation() {
  local here site
  here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
  for site in "$here"/../integrations/site "$here"/../nvprof_kit/integrations/site; do
    [ -f "$site/sitecustomize.py" ] || continue
    printf '%s\n' NVPROF_KIT_ANNOTATE=1 "PYTHONPATH=$(readlink -f -- "$site")${PYTHONPATH:+:$PYTHONPATH}"
    return
  done
  fail 3 "--annotate needs the package nvprof_kit beside these recipes; run \`nvprof-kit profile --annotate\`, or annotate in the program"
}

# --- options: a recipe's help is the list of them ---

declare -A long_names=() takes_value=()
# shellcheck disable=SC2034
program=()

# Takes the options of a help text: `  -o, --output NAME  ...` has a value, `  -f, --force  ...` has none.
read_options() { # TEXT
  local line pattern='^  (-([A-Za-z]), |    )--([a-z-]+)( [A-Z][A-Z:]*)?( |$)'
  while IFS= read -r line; do
    [[ $line =~ $pattern ]] || continue
    [ -z "${BASH_REMATCH[2]}" ] || long_names[-${BASH_REMATCH[2]}]=${BASH_REMATCH[3]}
    long_names[--${BASH_REMATCH[3]}]=${BASH_REMATCH[3]}
    takes_value[${BASH_REMATCH[3]}]=${BASH_REMATCH[4]}
  done <<<"$1"
}

# Calls the recipe's `option NAME VALUE` for each option, and sets `program` to the words behind `--`.
take_options() { # WORD...
  local name value
  # shellcheck disable=SC2034  # the recipes read it
  program=()
  read_options "$(usage)"
  while [ $# -gt 0 ]; do
    case $1 in
      --)
        # shellcheck disable=SC2034
        program=("${@:2}")
        break ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; # --output=NAME is --output NAME
    esac
    name=${long_names[$1]-} value=''
    case $1 in
      -h | --help) usage; exit 0 ;;
      -*) [ -n "$name" ] || fail 2 "no option $1; see $me --help" ;;
      *)
        [ -z "${no_program-}" ] || fail 2 "no option $1; see $me --help"
        fail 2 "the program comes after --: $me [OPTION]... -- $*" ;;
    esac
    # shellcheck disable=SC2034
    given=$1 # as it was written, for messages
    if [ -n "${takes_value[$name]}" ]; then
      [ $# -ge 2 ] || fail 2 "$1 needs a value; see $me --help"
      value=$2
      shift
    fi
    option "$name" "$value"
    shift
  done
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
stage_of() { # NAME of the report
  printf '%s' "$(folder_of "$1").${1##*/}.partial"
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

# Brings what is in a stage to its place; sets `published`, and `status` to 1 where that was 0 and something stays behind.
publish() { # STAGE FOLDER FORCE
  local file target
  published=()
  for file in "$1"/*; do
    [ -e "$file" ] || continue
    target=$2${file##*/}
    if [ -e "$target" ] && [ -z "$3" ]; then
      warn "$target exists; the new one stays in $1"
    elif mv -fT -- "$file" "$target"; then
      published+=("$target")
      continue
    else
      warn "cannot write $target; it stays in $1"
    fi
    status=$((status ? status : 1))
  done
  rmdir -- "$1" 2>/dev/null || :
  [ ${#published[@]} -eq 0 ] || note "wrote ${published[*]}"
}

say_next() { # WORD...; the command that reads what was written
  note "next: $(print_command "$@")"
}

# --- a run under supervision ---

# Runs a profiler and waits for it. Ctrl-C, SIGTERM and SIGHUP (a lost terminal, taken for SIGTERM) come
# to the profiler once: it fetches what the program has buffered, then ends it. Told twice nsys would lose the report,
# so a second signal within 3 s is taken for the same. Sets `status` to what the program gave.
supervise() { # WORD...
  local child='' shared='' began=$SECONDS asked_at=-1
  NVPROF_KIT_RUN=$$.$(date +%s%N)
  export NVPROF_KIT_RUN
  trap 'pass_on INT' INT
  trap 'pass_on TERM' TERM HUP
  # 3 may be a log of the recipe's, which would not end while the program's children have it open
  if [ -t 0 ]; then
    # only the group in front may read from a terminal; Ctrl-C comes to all of it
    shared=yes
    (trap - INT TERM HUP && exec "$@" 3>&-) <&0 &
  else
    set -m # a process group of its own: Ctrl-C comes to this script only
    "$@" <&0 3>&- &
    set +m
  fi
  child=$!
  while kill -0 "$child" 2>/dev/null; do # a signal ends the waiting, and it may be at work still
    wait "$child" || :
  done
  # shellcheck disable=SC2034  # the recipes read it
  { status=0 && wait "$child"; } || status=$?
  trap '' INT TERM HUP # what was captured is brought to its place
}

pass_on() { # SIGNAL
  local first=$((asked_at < 0)) since=$((SECONDS - asked_at))
  if [ "$first" = 1 ]; then
    asked_at=$SECONDS
    # A launcher ends the other ranks when one fails, and they may have ended by then: their reports would not be written.
    if [ $((SECONDS - began)) -ge 3 ] && ! program_runs; then
      warn "the program has ended and its report is being written; another signal, 3 s from now, stops that"
    elif [ "$1$shared" != INTyes ]; then
      kill "-$1" "$child" 2>/dev/null || :
    fi
  elif [ "$since" -ge 3 ]; then # nobody's second touch of the same keys
    kill "-$1" "$child" 2>/dev/null || :
  fi
}

kill_all() { # SIGNAL PROCESSES, a line each
  local process
  for process in $2; do kill "-$1" "$process" 2>/dev/null || :; done
}

program_runs() {
  [ -n "$(others)" ]
}

others() { # the running processes of this run that are not the profiler's
  local process name
  for process in $(orphans); do
    name=$(cat "/proc/$process/comm" 2>/dev/null) || continue
    case $name in nsys* | Qdstrm* | ncu* | cat | sleep) ;; *) echo "$process" ;; esac
  done
}

# Ends whatever a killed profiler left running: the program, its children, and the profiler's own agent. They are known by the
# environment they got from here.
end_orphans() {
  local patience signal
  for signal in 0 TERM KILL; do
    for patience in 1 2 3 4 5 6 7 8 9 10; do
      [ -n "$(orphans)" ] || return 0
      [ "$patience" -ne 1 ] || [ "$signal" = 0 ] || kill_all "$signal" "$(orphans)"
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
