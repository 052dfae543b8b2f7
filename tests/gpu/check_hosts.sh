#!/usr/bin/env bash
# Run the hosts' examples on a machine with a GPU under nsys and print of each a short table of its layers and whether all GPU
# time is accounted for. From the repository's root:
#   tests/gpu/check_hosts.sh FOLDER [EXAMPLE]...
# By default trainer, lightning_module, accelerate_loop, flux_pipeline, and plain, which is a loop without a line of ours under
# NVPROF_KIT_ANNOTATE=1. Leaves FOLDER/summary.txt and a capture each. Exits 1 if anything is not as it should be.
set -uo pipefail
out=${1:?usage: check_hosts.sh FOLDER [EXAMPLE]...}
shift
[ $# -gt 0 ] || set -- trainer lightning_module accelerate_loop flux_pipeline plain
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
failed=0
cd "$out" || exit 2
: >summary.txt

cat >plain.py <<'PROGRAM'
import sys

import torch
from torch.nn import functional as F

sys.path.insert(0, sys.argv[1])
from tiny_transformer import TinyTransformer, counting

model = TinyTransformer().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens in torch.utils.data.DataLoader(counting(32, 129), batch_size=8):
    tokens = tokens.cuda()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
PROGRAM

check() { # CAPTURE; layers, phases and steps of its table, and the sum of self times against all operations
  "$python" -m nvprof_kit layers "$1" --by step --steps all --format csv 2>/dev/null | "$python" -c '
import csv, sqlite3, sys
rows = list(csv.DictReader(sys.stdin))
with sqlite3.connect("file:" + sys.argv[1] + "?mode=ro", uri=True) as file:
    known = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
    tables = ["CUPTI_ACTIVITY_KIND_" + kind for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")]
    whole = sum(file.execute(f"SELECT coalesce(sum(end - start), 0) FROM {table}").fetchone()[0] for table in tables if table in known)
own = sum(int(row["gpu_self_ns"]) for row in rows)
layered = sum(int(row["gpu_self_ns"]) for row in rows if row["layer"] != "(none)")
steps = {row["step"] for row in rows if row["step"] not in ("", "-1") and int(row["gpu_ops"])}
layers = {row["layer"] for row in rows} - {"(none)"}
print("yes" if own == whole > 0 and layered and steps else "NO", end=" ")
print(f"{len(layers)} layers, {len(steps)} steps, {own} of {whole} ns accounted for, {layered / max(whole, 1):.1%} in layers")' "$1"
}

for name; do
  program=("$python" "$root/examples/$name.py")
  environment=(NVPROF_KIT=auto)
  if [ "$name" = plain ]; then
    program=("$python" "$out/plain.py" "$root/examples")
    environment+=(NVPROF_KIT_ANNOTATE=1 "PYTHONPATH=$root/nvprof_kit/integrations/site:$PYTHONPATH")
  fi
  began=$SECONDS
  if ! env "${environment[@]}" python3 -m nvprof_kit profile -f -o "$out/$name" -- "${program[@]}" >"$name.log" 2>&1; then
    failed=1
    printf '%-18s NO  %s\n' "$name" "$(tail -n 3 "$name.log" | tr '\n' ' ')" | tee -a summary.txt
    continue
  fi
  read -r ok text < <(check "$out/$name.sqlite")
  [ "$ok" = yes ] || failed=1
  printf '%-18s %-3s %s s: %s\n' "$name" "${ok:-NO}" $((SECONDS - began)) "${text-}" | tee -a summary.txt
  grep '^nvprof-kit annotate' "$name.log" | tee -a summary.txt
  "$python" -m nvprof_kit layers "$name.sqlite" --format csv 2>/dev/null | "$python" -c '
import csv, sys
rows = sorted(csv.DictReader(sys.stdin), key=lambda row: -int(row["gpu_self_ns"]))[:8]
for row in rows:
    print("    {:52} {:14} {:>10.3f} ms {:>6.1%}".format(row["layer"], row["phase"], int(row["gpu_self_ns"]) / 1e6, float(row["share"])))' |
    tee -a summary.txt
done
exit $failed
