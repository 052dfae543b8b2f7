"""What annotation costs a training step: copies of a model that share its weights take a step each in turn.

    python overhead.py [--layers 48] [--width 2048] [--batch 4] [--rounds 200] [--output overhead.txt]

One copy is plain, one annotated as by default, one plain again as a control. Prints the median of the ratios to the
plain step of the same round, with its 95 % interval. Run it alone, under nsys, or under the embedded recorder. The
first rounds are not counted; every other one runs in reverse.
The time of the clock is compared, and that of the processor; with --device cpu --width 128 --sequence 8 --batch 1,
hardly anything but what Python and PyTorch take for a call.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from train import llama

import nvprof_kit

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
KINDS = ("plain", "annotated", "control")
WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output", type=Path, metavar="FILE", help="what is printed, also there")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequence", type=int, default=1024)
    options = parser.parse_args()
    with torch.device(options.device):
        model = llama(options.layers, options.width, num_attention_heads=options.width // 128).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, 32000, (options.batch, options.sequence), device=options.device)
    synchronize = torch.get_device_module(tokens.device).synchronize
    copies = {kind: copy.deepcopy(model, {id(weight): weight for weight in model.parameters()}) for kind in KINDS}
    modules = len(nvprof_kit.annotate_model(copies["annotated"]).paths)
    seconds: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds + WARM_UP):
        for kind in KINDS[:: -1 if number % 2 else 1]:
            synchronize()
            began = [clock() for clock in CLOCKS.values()]
            with nvprof_kit.step(number):
                copies[kind](input_ids=tokens, labels=tokens)[0].backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronize()
            seconds[kind].append([clock() - start for start, clock in zip(began, CLOCKS.values(), strict=True)])
    lines = [f"{options.layers} layers, batch {options.batch}, {options.rounds} rounds, {modules} modules"]
    for which, clock in enumerate(CLOCKS):
        times = {kind: [step[which] for step in steps[WARM_UP:]] for kind, steps in seconds.items()}
        for kind in KINDS:
            what = f"{clock}: {kind}, {statistics.median(times[kind]) * 1e3:.1f} ms"
            lines.append(what if kind == "plain" else ratios(what, times[kind], times["plain"]))
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join([*lines, ""]))


def ratios(text: str, seconds: list[float], base: list[float]) -> str:
    each = list(map(float.__truediv__, seconds, base))
    low, median, high = statistics.quantiles(each, n=4)
    return f"{text}: median ratio {median:.4f} ± {1.82 * (high - low) / len(each) ** 0.5:.4f}"


if __name__ == "__main__":
    main()
