"""A loop of one's own on Lightning's Fabric."""

import torch
from lightning.fabric import Fabric
from tiny_transformer import TinyTransformer, counting
from torch.nn import functional as F
from torch.utils.data import DataLoader

from nvprof_kit.integrations.fabric import FabricCallback  # (1)

fabric = Fabric(devices=1, callbacks=[FabricCallback()])  # (2)
model = TinyTransformer(width=64, layers=2)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(counting(16, 33), batch_size=4))
for tokens in loader:
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
