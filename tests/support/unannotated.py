"""A training of two steps without a line of ours, to run in the root of the repository."""

PROGRAM = """
import sys
import torch
from torch import nn
sys.path.append("examples")
from tiny_transformer import TinyTransformer, counting
head, model = nn.Linear(4, 4), TinyTransformer(width=64, layers=2)
head(torch.randn(2, 4))  # small: none of the models
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(counting(8, 17), batch_size=4, num_workers=1)
for tokens in loader:
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
