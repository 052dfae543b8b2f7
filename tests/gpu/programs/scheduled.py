"""Train a small Llama in a loop under `nvprof_kit.record`, alone or on several ranks.

    python scheduled.py [--steps 12] [--pause 0.5] [--schedule 3:5]

Without --schedule it is taken from NVPROF_KIT_SCHEDULE. Under torchrun the ranks average their gradients.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from train import llama

import nvprof_kit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between steps")
    parser.add_argument("--schedule", help="else NVPROF_KIT_SCHEDULE")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = llama(4, 512, 8000).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    nvprof_kit.annotate_model(model)
    nvprof_kit.annotate_optimizer(optimizer)
    tokens = torch.randint(0, 8000, (4, 512), device="cuda")
    with nvprof_kit.record(schedule=options.schedule) as profiling:
        for number in range(options.steps):
            with nvprof_kit.step(number):
                model(input_ids=tokens, labels=tokens).loss.backward()
                for weight in model.parameters():
                    if dist.is_initialized():
                        dist.all_reduce(weight.grad)
                optimizer.step()
                optimizer.zero_grad()
            profiling.step()
            time.sleep(options.pause)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
