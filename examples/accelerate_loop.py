"""A loop of one's own on Accelerate, with gradient accumulation."""

import torch
from accelerate import Accelerator
from tiny_transformer import TinyTransformer, counting
from torch.nn import functional as F
from torch.utils.data import DataLoader

from nvprof_kit.integrations.accelerate import LayerProfileKwargs  # (1)

accelerator = Accelerator(gradient_accumulation_steps=2)
model = TinyTransformer(width=64, layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(counting(24, 33), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with accelerator.profile(LayerProfileKwargs()) as profiler:  # (2)
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        profiler.step()
