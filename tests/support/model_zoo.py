"""Small models of every shape that annotation must get right; each comes with a function that gives its loss."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Subject(NamedTuple):
    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


def _tokens() -> torch.Tensor:
    return torch.arange(24).reshape(2, 12) % 32


def transformer(kind: str, task: str, **sizes: Any) -> Subject:
    """A small model of transformers, ``LlamaForCausalLM`` say."""
    transformers = importlib.import_module("transformers")
    usual = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = getattr(transformers, kind + task)(getattr(transformers, f"{kind}Config")(**{**usual, **sizes}))
    inputs = {"input_ids": _tokens(), "labels": _tokens()}
    if "image_size" in sizes:
        pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
        inputs = {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    return Subject(model, lambda model: model(**inputs).loss)


def flux() -> Subject:  # two kinds of blocks
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.linspace(-1, 1, 64).reshape(1, 16, 4),
        "encoder_hidden_states": torch.linspace(-1, 1, 256).reshape(1, 8, 32),
        "pooled_projections": torch.linspace(-1, 1, 32).reshape(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return Subject(model, lambda model: model(**inputs).sample.square().mean())


def torch_encoder() -> Subject:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
    inputs = torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)
    return Subject(nn.TransformerEncoder(layer, 3), lambda model: model(inputs).square().mean())


class ViewBlock(nn.Module):
    """Returns a view of what it made, on which its caller then works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.norm(hidden)))[..., :16]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ViewBlock() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            made = block(hidden)
            made += hidden
            made.mul_(0.5)
            hidden = made
        return hidden


def in_place() -> Subject:
    return Subject(InPlace(), lambda model: model(torch.linspace(-1, 1, 64).reshape(4, 16)).square().mean())


@dataclass
class Pair:
    hidden: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


class PairBlock(nn.Module):
    """Several outputs, in a dataclass that holds a mapping of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, pair: Pair) -> Pair:
        wide = torch.relu(self.up(self.norm(pair.hidden)))
        first, second = wide.chunk(2, -1)
        return Pair(pair.hidden + self.down(wide), {"halves": [first.sin(), second.cos()]})


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        pair = Pair(hidden, {})
        total = hidden.new_zeros(())
        for block in self.blocks:
            pair = block(pair)
            total = total + sum(half.mean() for half in pair.extra["halves"])
        return pair.hidden.square().mean() + total


def dataclass_outputs() -> Subject:
    return Subject(Pairs(), lambda model: model(torch.linspace(-1, 1, 64).reshape(4, 16)))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


def checkpointed(*, reentrant: bool) -> Subject:
    return Subject(Checkpointed(reentrant=reentrant), lambda model: model(_tokens()).square().mean())


def frozen_first() -> Subject:
    subject = ZOO["llama"]()
    subject.model.model.embed_tokens.requires_grad_(False)
    subject.model.model.layers[0].requires_grad_(False)
    return subject


class TwoKinds(nn.Module):
    """Blocks of two kinds by turns, as video transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.ModuleList(PairBlock() for _ in range(2))
        self.temporal = nn.ModuleList(ViewBlock() for _ in range(2))
        self.out = nn.Linear(16, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for spatial, temporal in zip(self.spatial, self.temporal, strict=True):
            hidden = spatial(Pair(hidden, {})).hidden
            hidden = hidden + temporal(hidden.transpose(0, 1)).transpose(0, 1)
        return self.out(hidden)


def two_kinds() -> Subject:
    return Subject(TwoKinds(), lambda model: model(torch.linspace(-1, 1, 128).reshape(4, 2, 16)).square().mean())


class Net(nn.Module):
    """A head with the embedding's weights, a part that is never called, blocks in any order, called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.same = nn.Identity()
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, order: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        hidden = self.embed(tokens)
        for index in order:
            hidden = self.layers[index](src=hidden)
        return self.head(self.same(self.norm(hidden)))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers[0].forward(self.embed(tokens))


TOKENS = torch.arange(6).reshape(2, 3)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


ZOO: dict[str, Callable[[], Subject]] = {
    "llama": partial(transformer, "Llama", "ForCausalLM", num_hidden_layers=3, num_key_value_heads=2),
    # tied weights, dropout
    "gpt2": partial(transformer, "GPT2", "LMHeadModel", num_hidden_layers=3, n_positions=16),
    "bert": partial(transformer, "Bert", "ForMaskedLM"),
    "vit": partial(transformer, "ViT", "ForImageClassification", image_size=16, patch_size=8),
    # encoder and decoder
    "t5": partial(
        transformer,
        "T5",
        "ForConditionalGeneration",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    "mixtral": partial(transformer, "Mixtral", "ForCausalLM", num_key_value_heads=2, num_local_experts=4),
    "flux": flux,
    "torch_encoder": torch_encoder,
    "in_place": in_place,
    "dataclass_outputs": dataclass_outputs,
    "checkpoint_reentrant": partial(checkpointed, reentrant=True),
    "checkpoint_non_reentrant": partial(checkpointed, reentrant=False),
    "frozen_first": frozen_first,
    "two_kinds": two_kinds,
}


def make(name: str) -> Subject:
    """A model of the zoo, the same each time."""
    torch.manual_seed(0)
    return ZOO[name]()


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: weight.grad for name, weight in model.named_parameters()}
