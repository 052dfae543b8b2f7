#!/usr/bin/env bash
# Profile one program with nsys, from start to end or a window of it, so that `nvprof-kit layers` can tell which layer
# costs what.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: profile.sh [OPTION]... -- PROGRAM [ARGUMENT]...

Run PROGRAM under `nsys profile` and leave NAME.nsys-rep, for the Nsight Systems GUI, and NAME.sqlite, for nvprof-kit:

  profile.sh -- python train.py
  nvprof-kit layers run.sqlite

Options:
  -o, --output NAME   name of the report without its suffix (default: run, from nvprof-kit the program and the time);
                      %h is the host, %p this process, %q{VARIABLE} a variable
  -f, --force         overwrite NAME.nsys-rep and NAME.sqlite
  -p, --preset NAME   settings: train (default), infer, graphs, memory, metrics, light, or a file like those in presets/
  -t, --trace LIST    what nsys traces instead of the preset's list; the table shows only what is traced
  -x, --nsys OPTION   additional option for nsys profile, passed unchanged: -x --stats=true; may be given again
      --annotate      annotate the model without changing the program, at the model's first call
      --min-free MB   refuse to start with less disk left (default: 1024)
  -q, --quiet         print only errors, for the logs of batch jobs
  -n, --dry-run       print the equivalent nsys command and run nothing
  -h, --help          print this and exit

What to capture, one of (default: all of the run):
      --step N        only step N, the range of nvprof_kit.step(N)
      --range TEXT    the first range TEXT in domain nvprof_kit; TEXT@DOMAIN for another domain, TEXT@ for no domain
      --schedule S    the windows of nvprof_kit.scheduled() in the program, with the schedule S: early, stable,
                      periodic, 50:60, or skip_first=50,active=10,repeat=2; of several windows each has
                      its report: NAME.1, NAME.2, ...
      --windows N     N windows of the program's own nvprof_kit.scheduled(); 0: all
      --cuda-profiler from cudaProfilerStart to cudaProfilerStop
      --delay S       begin S seconds after the program's start
      --duration S    end after S seconds, and the program with it (SIGTERM); goes with --delay
      --keep-running  with --duration: let the program continue; this script then returns immediately with 0

Environment:
  NSYS                the nsys to run (default: nsys on PATH)

Ctrl-C and SIGTERM end the program, and the report is still written. A report appears under its name when it is whole.
Exit status: the program's own; 1 where nothing was captured or the report could not be brought to its place, 2 for a wrong
call or an existing report, 3 where there is no nsys, 127 no program.
HELP
}

output=run preset=train trace='' force='' dry_run='' min_free=1024
window='' window_value='' delay='' duration='' keep_running=''
extra=()

need_seconds() { # OPTION VALUE
  [[ $2 =~ ^[0-9]{1,9}(\.[0-9]+)?$ ]] || fail 2 "$1 needs a number of seconds, not '$2'"
}

need_schedule() { # VALUE; what nvprof_kit.scheduled() takes
  local field='(skip_first|wait|warmup|active|repeat)=[0-9]+'
  [[ $1 =~ ^(early|stable|periodic|[0-9]+:[0-9]+|$field(,$field)*)$ ]] ||
    fail 2 "--schedule '$1' is none of early, stable, periodic, no 50:60 and no list such as skip_first=50,active=10,repeat=2"
}

choose_window() { # KIND VALUE
  [ -z "$window" ] || fail 2 "--$window and --$1 exclude each other: each says what to capture"
  window=$1 window_value=$2
}

option() { # NAME VALUE
  case $1 in
    output) output=$2 ;;
    force) force=yes ;;
    preset) preset=$2 ;;
    trace) trace=$2 ;;
    nsys) extra+=("$2") ;;
    annotate) needed=$(annotation); mapfile -t -O ${#environment[@]} environment <<<"$needed" ;;
    min-free) need_number "$given" "$2"; min_free=$2 ;;
    quiet) quiet=yes ;;
    dry-run) dry_run=yes ;;
    step | windows) need_number "$given" "$2"; choose_window "$1" "$2" ;;
    range) [ -n "${2%%@*}" ] || fail 2 "--range '$2' names no range"; choose_window range "$2" ;;
    schedule) need_schedule "${2//[[:space:]]/}"; choose_window schedule "${2//[[:space:]]/}" ;;
    cuda-profiler) choose_window cuda-profiler '' ;;
    delay) need_seconds "$given" "$2"; delay=$2 ;;
    duration) need_seconds "$given" "$2"; duration=$2 ;;
    keep-running) keep_running=yes ;;
  esac
}

environment=()
take_options "$@"
[ ${#program[@]} -gt 0 ] || fail 2 "no program to run; needed: $me [OPTION]... -- python train.py"
[ -z "$window" ] || [ -z "$delay$duration" ] ||
  fail 2 "--$window goes without --delay and --duration: the $window says when"
[ -z "$keep_running" ] || [ -n "$duration" ] || fail 2 "--keep-running is of use only with --duration S"

# the settings: the preset, then the window, then what was asked for in nsys's own words
read_preset "$preset"
[ -z "$trace" ] || trace_only "$trace"

capture_range() { # RANGE END
  settings+=(--capture-range=nvtx "--nvtx-capture=$1" "--capture-range-end=$2")
}
range_end() { # NUMBER of windows, 0 where they go on
  case $1 in 0) echo repeat ;; 1) echo stop ;; *) echo "repeat:$1" ;; esac
}
windows_of() { # SCHEDULE; prints the number of its windows
  case $1 in
    stable) echo 2 ;;
    periodic) echo 5 ;;
    *repeat=*) count=${1##*repeat=}; echo "${count%%,*}" ;;
    *) echo 1 ;;
  esac
}
never="" # what did not begin, where nothing was captured
case $window in
  step)
    never="step $window_value never began; it is what nvprof_kit.step($window_value) announces"
    capture_range "step $window_value@nvprof_kit" stop ;;
  range)
    never="no range '$window_value' began"
    case $window_value in
      *@) capture_range "${window_value%@}" stop ;;
      *@*) capture_range "$window_value" stop ;;
      *) capture_range "$window_value@nvprof_kit" stop ;;
    esac ;;
  schedule)
    never="no window of the schedule $window_value began; is nvprof_kit.scheduled() around the program's loop, and are there \
so many steps?"
    environment+=("NVPROF_KIT_SCHEDULE=$window_value")
    capture_range window@nvprof_kit "$(range_end "$(windows_of "$window_value")")" ;;
  windows)
    never="no window of nvprof_kit.scheduled() began"
    capture_range window@nvprof_kit "$(range_end "$window_value")" ;;
  cuda-profiler)
    never="the program never called cudaProfilerStart"
    settings+=(--capture-range=cudaProfilerApi --capture-range-end=stop) ;;
esac
[ -z "$delay" ] || settings+=("--delay=$delay")
[ -z "$delay" ] || never="the program ended before the $delay s of --delay were over"
[ -z "$duration" ] || settings+=("--duration=$duration")
[ -z "$keep_running" ] || settings+=(--kill=none)
fit_settings profile
for option in "${extra[@]}"; do
  case $option in --*=*) add_extra profile "$option" ;; *) settings+=("$option") ;; esac
done

output=${output%.nsys-rep}
if [ -n "$dry_run" ]; then
  need_name "$output"
  print_capture "${environment[@]}" "$nsys" profile "${settings[@]}" --export=sqlite ${force:+--force-overwrite=true} \
    "--output=$output" "${program[@]}"
  exit 0
fi
expand_name "$output"
need_name "$output"

need_nsys
# .1 is the first of several windows
refuse_existing "$force" "$output".{nsys-rep,sqlite} "$output".1.{nsys-rep,sqlite}
need_program "${program[0]}"
[ -z "$duration" ] || [ "${duration%%.*}" -le 60 ] ||
  note "--duration $duration: beyond 60 s reports grow unwieldy and nsys may drop events; a few steps answer the question"
stage=$(stage_of "$output")
folder=$(folder_of "$output")
check_disk "${folder:-.}" "$min_free"
open_stage "$stage" "$force"
run=$(CDPATH='' cd -- "$stage" && pwd)/.run
mkdir -- "$run"

leave_running=$keep_running
if [ -n "$duration$keep_running" ] && [[ "${settings[*]}" != *--kill=* ]]; then
  # nsys would not wait for the program that it ends
  how=stay ends_with_capture=yes
  settings+=(--kill=none)
fi
[ -z "$leave_running" ] || check_disk "${TMPDIR:-/tmp}" "$min_free" # the program may have its part of nsys's files there
[ ${#environment[@]} -eq 0 ] || export "${environment[@]}"
# what begins later misses the mark with which the program says at its begin which rank it is
case " ${settings[*]}" in *' --capture-range='* | *' --delay='*) export NVPROF_KIT_RANK_MARK=step ;; esac
began=$SECONDS
wrap_program "${program[@]}"
name=${output##*/}
profile=("$nsys" profile "${settings[@]}" --export=sqlite "--output=$stage/${name//%/%%}" "${wrapped[@]}")
supervise_nsys "$stage" "${profile[@]}"
if lost_its_agent "$stage"; then
  warn "nsys lost its own agent before it began the program, and is started again"
  end_orphans
  supervise_nsys "$stage" "${profile[@]}"
fi
[ -s "$run/pid" ] || [ -s "$run/end" ] || never="nsys ended before it began the program"
[ -n "$keep_running" ] || { [ "$status" -le 128 ] && [ -n "$(ls "$stage")" ] && [ -z "$left_early" ]; } || end_orphans
[ -n "$window$duration" ] || [ $((SECONDS - began)) -le 60 ] ||
  note "all $((SECONDS - began)) s of the run were captured; a window of a few steps is smaller and as good: see --step"
finish "$stage" "$folder" "$force" "$never"
exit "$status"
