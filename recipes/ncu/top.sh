#!/usr/bin/env bash
# Measure with ncu the kernels that took most GPU time in an nsys capture.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

usage() {
  cat <<'HELP'
Usage: top.sh -c CAPTURE.sqlite [OPTION]... -- PROGRAM [ARGUMENT]...

Measure the kernels that took most GPU time in an nsys capture of the same program, each once in every grid, block and
shared memory it comes with. Needs python3, no package. (nvprof-kit ncu plan chooses by the share they cover.)

  top.sh -c run.sqlite --top 5 -- python train.py
  nvprof-kit ncu layers top.csv --capture run.sqlite

Options:
  -c, --capture FILE  an .sqlite of nsys
      --top N         how many kernels (default: 10)
HELP
  common_help
}

capture='' top=10
option() { # NAME VALUE
  case $1 in
    capture) capture=$2 ;;
    top) need_number "$given" "$2"; top=$2 ;;
    *) common_option "$@" ;;
  esac
}

take_options "$@"
[ -n "$capture" ] || fail 2 "no capture; needed: top.sh -c run.sqlite -- python train.py"
[ -f "$capture" ] || fail 2 "$capture: no such file"
[ ${#sets[@]} -gt 0 ] || sets=(speed-of-light memory tensor occupancy stalls)
output=${output:-top}
command -v python3 >/dev/null || fail 3 "no python3 on PATH, which reads the capture; $(named kernels "ncu profile") -k NAME goes without"
# linker names: nothing in them needs a quote, and no two kernels share one
names=$(python3 - "$capture" "$top" "$me" <<'PYTHON'
import re, sqlite3, sys
from urllib.parse import quote
try:
    db = sqlite3.connect(f"file:{quote(sys.argv[1])}?mode=ro&immutable=1", uri=True)
    rows = db.execute(
        'SELECT s.value FROM CUPTI_ACTIVITY_KIND_KERNEL AS k JOIN StringIds AS s ON s.id = k.mangledName '
        'GROUP BY s.value ORDER BY sum(k."end" - k.start) DESC LIMIT ?', (int(sys.argv[2]),)).fetchall()
except sqlite3.Error as error:
    sys.exit(f"{sys.argv[3]}: {sys.argv[1]}: not an nsys capture with kernels ({error})")
print("|".join(re.escape(name) for (name,) in rows))
PYTHON
) || exit 2
[ -n "$names" ] || fail 2 "$capture: no kernel in it"
refuse_ranges "ncu measures ranges, and no kernels by their names"
need_filter_by_configuration
measure --filter-mode=per-launch-config --kernel-name-base=mangled "--kernel-id=::regex:^($names)\$:1" -- "${program[@]}"
