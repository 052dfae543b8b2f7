"""A model under Composer's Trainer, its batches split into micro-batches."""

import torch
from composer import Trainer
from composer.models import ComposerModel
from tiny_transformer import TinyTransformer, counting
from torch.nn import functional as F
from torch.utils.data import DataLoader

from nvprof_kit.integrations.composer import LayerCallback  # (1)


class Language(TinyTransformer, ComposerModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens[:, :-1])

    def loss(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


model, loader = Language(width=64, layers=2), DataLoader(counting(24, 33), batch_size=8)
options = dict(max_duration="1ep", device_train_microbatch_size=4, progress_bar=False, console_log_interval="10ep")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
Trainer(model=model, train_dataloader=loader, optimizers=optimizer, callbacks=[LayerCallback()], **options).fit()  # (2)
