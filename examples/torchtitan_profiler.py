"""What torchtitan's trainer does with its configuration's profiler, on a model of one's own and one process."""

import torch
from tiny_transformer import TinyTransformer, counting
from torch.nn import functional as F

from nvprof_kit.integrations.torchtitan import LayerProfiler


class Trainer:  # torchtitan's has a model of several parts, and calls the profiler like this
    def __init__(self, profiler: LayerProfiler.Config) -> None:
        self.profiler, self.model_parts = profiler, [TinyTransformer(width=64, layers=2)]
        self.optimizer = torch.optim.AdamW(self.model_parts[0].parameters(), lr=1e-3)

    def train(self) -> None:
        with self.profiler.build(global_step=0) as profiler:
            for tokens in counting(12, 33).split(4):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model_parts[0](tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                self.optimizer.step()
                profiler.step()


Trainer(LayerProfiler.Config()).train()  # in torchtitan: config.profiler = LayerProfiler.Config()
