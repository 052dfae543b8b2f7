"""A LightningModule under Lightning's Trainer, with gradient accumulation and a validation."""

import lightning
import torch
from tiny_transformer import TinyTransformer, counting
from torch.nn import functional as F
from torch.utils.data import DataLoader

from nvprof_kit.integrations.lightning import LayerCallback  # (1)


class Language(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = TinyTransformer(width=64, layers=2)

    def training_step(self, tokens: torch.Tensor, _index: int) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    validation_step = training_step
    configure_optimizers = lambda self: torch.optim.AdamW(self.parameters(), lr=1e-3)  # noqa: E731


options = dict(max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(**options, logger=False, callbacks=[LayerCallback()])  # (2)
trainer.fit(Language(), DataLoader(counting(24, 33), batch_size=4), DataLoader(counting(4, 33), batch_size=4))
