# Shared by the recipes of this folder: their common options, the sets, the ncu at hand, and the run.
# shellcheck shell=bash
# Sourced, never run. A recipe takes its own options, hands the others to `common_option`, and ends with `measure`.

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../common.bash
. "$here/../common.bash"
ncu=${NCU:-ncu}

output='' force='' min_free=1024 dry_run='' arch='' window='' count='' skip='' clock=none cache=all replay='' rank=''
sets=() extra=() annotated=()
sections=() metrics=()

common_help() {
  cat <<'HELP'
  -s, --set NAME      what to measure; may be given again. Sets are the files of the folder sets/, or a file of your own:
                      speed-of-light, memory, tensor, occupancy, stalls, roofline, communication
  -o, --output NAME   name of the report without its suffix: leaves NAME.ncu-rep and NAME.csv
  -f, --force         overwrite these
      --min-free MB   refuse to start with less disk left (default: 1024)
      --window        measure only between the program's cudaProfilerStart and cudaProfilerStop
      --count N       at most N launches, or with --replay range and app-range N ranges
      --skip N        pass over the first N launches that match
      --arch ARCH     sm_80, sm_89, sm_90, sm_100 or sm_120, where metrics differ
                      (default: that of the first GPU, else sm_90)
      --clock MODE    base: fixed clocks, numbers that repeat; none: as the program runs, as nsys sees it (default: none)
      --cache MODE    all: empty caches before each pass, numbers that repeat; none: as they are (default: all)
      --replay MODE   kernel or application, of a layer range and app-range too: what is run again for each pass
                      (default: kernel; application, the whole program, with --rank or where NVLink is measured, since what
                      waits for another GPU hangs when it is run again alone)
      --rank N        of a program of several ranks measure rank N alone, since under one ncu they would wait for each other;
                      its launcher has to start rank.sh on each (see rank.sh --help)
  -x, --ncu OPTION    additional word for ncu, passed unchanged: -x --devices -x 0; may be given again
      --annotate      annotate the model without changing the program, at the model's first call
  -q, --quiet         print only errors
  -n, --dry-run       print the commands of ncu that do the same, and run nothing
  -h, --help          print this and exit

Environment:
  NCU                 the ncu to run (default: ncu on PATH)

Exit status: the program's own; 2 for a wrong call or an existing report, 3 where there is no ncu, 127 no program.
HELP
}

# Takes one of the common options; a recipe's own `option` hands it what it does not know.
common_option() { # NAME VALUE
  case $1 in
    set) sets+=("$2") ;;
    output)
      case $2 in *%*) fail 2 "$given '$2': ncu gives % a meaning; take a name without" ;; esac
      output=${2%.ncu-rep} ;;
    force) force=yes ;;
    min-free) need_number "$given" "$2"; min_free=$2 ;;
    window) window=yes ;;
    count) need_number "$given" "$2"; count=$2 ;;
    skip) need_number "$given" "$2"; skip=$2 ;;
    arch) one_of "$given" "$2" sm_80 sm_89 sm_90 sm_100 sm_120; arch=$2 ;;
    clock) one_of "$given" "$2" base none; clock=$2 ;;
    cache) one_of "$given" "$2" all none; cache=$2 ;;
    replay) one_of "$given" "$2" kernel application range app-range; replay=$2 ;;
    rank) need_number "$given" "$2"; rank=$2 ;;
    annotate) needed=$(annotation); mapfile -t annotated <<<"$needed"; export "${annotated[@]}" ;;
    ncu) extra+=("$2") ;;
    quiet) quiet=yes ;;
    dry-run) dry_run=yes ;;
  esac
}

# --- sets ---

find_arch() {
  local capability=''
  [ -z "$arch" ] || return 0
  local first=${CUDA_VISIBLE_DEVICES-}
  first=${first%%,*} # the program's first may be another than the host's
  capability=$(nvidia-smi ${first:+"--id=$first"} --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1) || :
  case $capability in
    8.9) arch=sm_89 ;; # tensor cores for fp8, no NVLink
    8.*) arch=sm_80 ;;
    10.* | 11.*) arch=sm_100 ;;
    12.*) arch=sm_120 ;; # no tcgen05, whose pipes sm_100 counts by names of their own
    *) arch=sm_90 ;;
  esac
}

read_set() { # NAME, or a file
  local file=$here/sets/$1.txt kind name only there
  case $1 in */*) file=$1 ;; esac
  [ -f "$file" ] || file=$1
  if [ ! -f "$file" ]; then
    there=("$here"/sets/*.txt)
    there=("${there[@]##*/}")
    fail 2 "no set '$1'; there are: ${there[*]%.txt}"
  fi
  [ -r "$file" ] || fail 2 "$file: no permission to read it"
  while IFS=$' \t\r' read -r kind name only || [ -n "$kind" ]; do
    only=${only%%#*}
    case $kind,$name in
      '#'* | ,) continue ;;
      section,[!#]* | metric,[!#]*) ;;
      *) fail 2 "$file: '$kind${name:+ $name}' is neither 'section NAME' nor 'metric NAME'" ;;
    esac
    for there in $only; do
      case $there in
        sm_80 | sm_89 | sm_90 | sm_100 | sm_120) ;;
        *) fail 2 "$file: $name is for '$there', which is none of sm_80, sm_89, sm_90, sm_100, sm_120" ;;
      esac
    done
    case " $only " in *[!\ ]*) [[ " $only " == *" $arch "* ]] || continue ;; esac
    case $kind in
      section) [[ " ${sections[*]} " == *" $name "* ]] || sections+=("$name") ;;
      metric) [[ " ${metrics[*]} " == *" $name "* ]] || metrics+=("$name") ;;
    esac
  done <"$file"
}

# Leaves out what the installed ncu does not know, with a note; without an ncu, or where it cannot tell, nothing is changed.
probe() {
  local known name chip kept=()
  "$ncu" --version >/dev/null 2>&1 || return 0
  known=$("$ncu" --list-sections 2>/dev/null | awk '{ print $1 }') || :
  if [ -n "$known" ]; then
    for name in "${sections[@]}"; do
      if grep -qxF -- "$name" <<<"$known"; then kept+=("$name"); else note "this ncu has no section $name: left out"; fi
    done
    sections=("${kept[@]}")
  fi
  case $arch in sm_80) chip=ga100 ;; sm_89) chip=ad102 ;; sm_90) chip=gh100 ;; sm_120) chip=gb202 ;; *) chip=gb100 ;; esac
  known=$("$ncu" --query-metrics --chip "$chip" 2>/dev/null | awk '{ print $1 }') || :
  grep -q '^gpu__time_duration' <<<"$known" || return 0
  kept=()
  for name in "${metrics[@]}"; do
    # metrics of the launch are not among those that are counted; *_pct and *.pct have no shorter name
    if [[ $name == launch__* ]] || grep -qxF -e "${name%%.*}" -e "$name" <<<"$known"; then
      kept+=("$name")
    else
      note "this ncu has no metric $name on $arch: left out"
    fi
  done
  metrics=("${kept[@]}")
}

# For all recipes but layer.sh.
refuse_ranges() { # WHY
  case $replay in range | app-range) fail 2 "with --replay $replay $1; $(named layer "ncu profile --layer PATH") takes it" ;; esac
}

# Launches are told apart by configuration only since ncu 2022.4.
need_filter_by_configuration() {
  ! command -v "$ncu" >/dev/null || grep -q per-launch-config <<<"$("$ncu" --help 2>&1)" ||
    fail 3 "this ncu cannot tell launches apart by configuration; needed 2022.4 or newer"
}

# Processes below one of this name are out of ncu's sight: rank.sh gives it to all ranks but one.
hidden=other-rank

# Of the ranks that one ncu sees, one at a time launches a kernel: those that wait for each other would wait for ever.
check_ranks() { # PROGRAM...
  local launcher=${1##*/} option='' needed
  case $launcher in
    torchrun) option=--no-python ;;
    accelerate | deepspeed) option=--no_python ;;
    mpirun | mpiexec) ;;
    *) launcher='' ;;
  esac
  [[ " $* " != *" torch.distributed."* ]] || launcher=torchrun option=--no-python
  if [ -z "$rank" ]; then
    [ -z "$launcher" ] ||
      note "ranks that wait for each other may hang under one ncu; with --rank N it measures one of them (see $me --help)"
    return 0
  fi
  ! command -v "$ncu" >/dev/null || grep -q exclude-tree <<<"$("$ncu" --help 2>&1)" ||
    fail 3 "this ncu cannot leave a process out; 2024.1 can"
  needed="-- ${launcher:-LAUNCHER} ... ${option:+$option }${here@Q}/rank.sh python train.py"
  if [[ " $* " != *rank.sh\ * ]]; then
    [ -z "$launcher" ] || [[ " $* " == *.sh\ * ]] ||
      fail 2 "--rank $rank: the launcher has to start rank.sh on each rank: $needed"
    note "--rank $rank: no word is rank.sh; unless the program starts it on each rank, ncu measures all, and they may hang"
  elif [ -n "$option" ] && [[ " ${*//_/-} " != *" --no-python "* ]]; then
    fail 2 "--rank $rank: without $option the launcher takes rank.sh for Python: $needed"
  fi
}

# --- the run ---

# The filter of a range that was pushed, anywhere in the stack: the slash behind it says so.
nvtx_range() { # DOMAIN, '' for the default one; TEXT
  printf -- '--nvtx-include=%s%s/' "${1:+$(nvtx_text "$1")@}" "$(nvtx_text "$2")"
}

# A text as an NVTX filter takes it: the signs it has a meaning for with a backslash before.
nvtx_text() { # TEXT
  printf '%s' "$1" | sed 's/[]@,[\/*+\\]/\\&/g'
}

# Sets `sections`, `metrics` and `replay` to what the chosen sets ask for and this ncu has.
choose_measurements() {
  local name
  find_arch
  read_set base
  for name in "${sets[@]}"; do read_set "$name"; done
  if [ -z "$replay" ]; then
    replay=kernel
    [[ -z $rank && "${sections[*]} ${metrics[*]}" != *[Nn]vl* ]] || replay=application
  fi
  probe
}

measure() { # FILTER... -- PROGRAM...
  local filter=() command name stage log refused
  local import=(--page=raw --csv --print-units=base)
  while [ "$1" != -- ]; do filter+=("$1"); shift; done
  shift
  [ $# -gt 0 ] || fail 2 "no program to run; needed: $me [OPTION]... -- python train.py"
  need_name "$output"
  choose_measurements
  check_ranks "$@"
  if [ -n "$dry_run" ]; then
    name=$output
    ncu_command "$@"
    print_command env LC_ALL=C ${rank:+"NVPROF_KIT_NCU_RANK=$rank"} "${annotated[@]}" \
      "${command[@]::1}" ${force:+--force-overwrite} "${command[@]:1}"
    printf '%s > %s\n' "$(print_command env LC_ALL=C "$ncu" "--import=$name.ncu-rep" "${import[@]}")" "$(print_command "$name.csv")"
    exit 0
  fi
  stage=$(stage_of "$output")
  name=$stage/${output##*/}
  ncu_command "$@"
  need_tool ncu "$ncu" "Nsight Compute" NCU
  refuse_existing "$force" "$output".{ncu-rep,csv}
  need_program "$1"
  check_disk "$(dirname -- "$stage")" "$min_free"
  open_stage "$stage" "$force"
  export LC_ALL=C # numbers without the locale's marks
  [ -z "$rank" ] || export NVPROF_KIT_NCU_RANK="$rank" # for rank.sh
  log=$stage/.said
  run_logged "$log"
  # no second time after a signal; 255 is an older ncu's own
  while [ ! -e "$name.ncu-rep" ] && ((status <= 128 || status == 255)) && refused=$(refused_metrics "$log") && leave_out "$refused"; do
    end_orphans
    note "ncu does not give what was left out here: once more, without"
    ncu_command "$@"
    run_logged "$log"
  done
  rm -f -- "$log"
  { [ "$status" -le 128 ] && [ -e "$name.ncu-rep" ]; } || end_orphans
  if [ ! -e "$name.ncu-rep" ]; then
    rm -rf -- "$stage"
    fail "$((status ? status : 1))" "no report: ncu measured no kernel; see what it said above${rank:+; is there a rank \
$rank on this host, started by rank.sh?}"
  fi
  "$ncu" "--import=$name.ncu-rep" "${import[@]}" >"$name.csv" ||
    fail "$((status ? status : 1))" "ncu cannot read what it wrote; what there is stays in $stage"
  publish "$stage" "$(folder_of "$output")" "$force"
  say_next nvprof-kit ncu layers "$output.csv"
  exit "$status"
}

# Sets `command` to the run of a program under `filter`, with what is measured.
ncu_command() { # PROGRAM...
  local joined
  command=("$ncu" --target-processes all --nvtx "--replay-mode=$replay" "--clock-control=$clock" "--cache-control=$cache")
  [ -z "$rank" ] || command+=("--target-processes-filter=exclude-tree:$hidden")
  [ -z "$window" ] || command+=(--profile-from-start=off)
  command+=("${filter[@]}")
  [ -z "$skip" ] || command+=("--launch-skip=$skip")
  [ -z "$count" ] || command+=("--launch-count=$count")
  command+=("${sections[@]/#/--section=}")
  joined=$(IFS=, && printf '%s' "${metrics[*]}")
  command+=("--metrics=$joined" "${extra[@]}" "--export=$name" "$@")
}

# --- metrics that ncu knows and does not give: NVLink's where there is none, or in a virtual machine; some of a range ---

# Runs `command`. What ncu itself says is seen as always, and kept; the program keeps its own output.
run_logged() { # FILE
  local patience logging
  exec 3> >(trap '' INT TERM HUP && exec tee -- "$1")
  logging=$!
  supervise "${command[@]::1}" "--log-file=/proc/$$/fd/3" "${command[@]:1}"
  exec 3>&-
  for patience in 1 2 3 4 5 6 7 8 9 10; do # what ncu left running might have it open
    kill -0 "$logging" 2>/dev/null || break
    sleep "0.$patience"
  done
}

refused_metrics() { # FILE; the names that ncu refuses in it, without .sum and the like
  local names
  names=$(sed -n 's/^==ERROR== Unable to access the following [0-9]* metrics*: \(.*\)$/\1/p
    s/^==ERROR== Metric \([^ ]*\) is not supported in range replay.*/\1/p' "$1" | tr ',' '\n' |
    sed 's/^ *//; s/\..*//' | sort -u)
  [ -n "$names" ] && printf '%s\n' "$names"
}

# Takes these metrics, and the sections that ask for them, out of what is measured; fails where that changes nothing.
leave_out() { # NAMES, a line each
  local name kept=() before="${sections[*]} ${metrics[*]}"
  for name in "${sections[@]}"; do
    if grep -qxFf <("$ncu" --list-metrics --section "$name" 2>/dev/null | sed 's/^ *-*//; s/\..*//') <<<"$1"; then
      note "section $name: left out"
    else kept+=("$name"); fi
  done
  sections=("${kept[@]}")
  kept=()
  for name in "${metrics[@]}"; do
    if grep -qxF -- "${name%%.*}" <<<"$1"; then note "metric $name: left out"; else kept+=("$name"); fi
  done
  metrics=("${kept[@]}")
  [ "$before" != "${sections[*]} ${metrics[*]}" ]
}
