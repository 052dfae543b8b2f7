"""A DeepSpeed engine with gradient accumulation and ZeRO stage 1: torchrun --nproc-per-node=1 deepspeed_engine.py."""

import deepspeed
import torch
from tiny_transformer import TinyTransformer, counting
from torch.nn import functional as F

from nvprof_kit.integrations.deepspeed import annotate_engine  # (1)

model = TinyTransformer(width=64, layers=2)
settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
settings["zero_force_ds_cpu_optimizer"] = False
settings["zero_allow_untested_optimizer"] = True
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=True)
with annotate_engine(engine):  # (2)
    for _ in range(6):
        tokens = counting(4, 33).to(engine.device)
        loss = F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
