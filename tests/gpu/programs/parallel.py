"""A Llama-shaped model trained over several GPUs with DDP; one process a GPU, for torchrun.

torchrun --nproc-per-node 2 parallel.py ddp
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from train import VOCABULARY, llama
from variants import STEPS, WARM_UP, collected, train_step

import nvprof_kit

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(llama(4).to("cuda", torch.bfloat16))
    nvprof_kit.annotate_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    nvprof_kit.annotate_optimizer(optimizer)
    tokens = torch.randint(0, VOCABULARY, (4, 513), device="cuda")
    for _ in range(WARM_UP):
        train_step(model, optimizer, tokens)
    dist.barrier()
    with collected():
        for number in range(STEPS):
            with nvprof_kit.step(number):
                train_step(model, optimizer, tokens)
    dist.destroy_process_group()
