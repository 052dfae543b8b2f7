"""Layers whose inputs are larger than the L2, for `tests/bench/limits_beside_ncu.py`.

python limits.py COUNTS.json        counts step 1 and leaves step 2 between cudaProfilerStart and Stop
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import nvprof_kit

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
WIDTH, BATCH, LENGTH, VOCABULARY = (4096, 8, 2048, 32000) if GPU else (64, 2, 32, 100)
HEADS = 32 if GPU else 4


def scaled(length: int) -> int:
    """A length of the models below, so that they run on a CPU too."""
    return length if GPU else max(length // 32, 1)


class Program(nn.Module):
    """Two blocks of a Llama of 7B shape, and the layers that PyTorch has a kernel each for."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = llama(WIDTH, 11008 if GPU else 160, HEADS, VOCABULARY)
        self.plain = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.RMSNorm(WIDTH),
            nn.Softmax(-1),
            nn.SiLU(),
        )
        self.groups = nn.GroupNorm(8, LENGTH)
        self.thin = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False))  # as in LoRA
        self.few_rows = nn.Linear(WIDTH, VOCABULARY, bias=False)  # as in decoding

    def forward(self, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        results = self.plain(values), self.groups(values), self.thin(values), self.few_rows(values[:, :8])
        return self.llama(input_ids=tokens, labels=tokens).loss + sum(result.float().mean() for result in results)


def llama(width: int, inner: int, heads: int, vocabulary: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads // 4, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class DiffusionBlock(nn.Module):
    """A block of a DiT: shift, scale and gate of both parts come from the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attention = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        x = x + gate1 * self.proj(attention.transpose(1, 2).flatten(2))
        return x + gate2 * self.fc2(self.act(self.fc1(self.norm2(x) * (1 + scale2) + shift2)))


def models() -> tuple[nn.ModuleDict, dict[str, Callable[[], torch.Tensor]]]:
    """Models of usual width, and what makes their losses."""
    width, vocabulary = scaled(2048), scaled(8000)

    def tokens(batch: int, length: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (batch, length))

    def loss_of(name: str, **batch: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: parts[name](**batch).loss

    dit_width = scaled(1152)
    moe = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width, moe_intermediate_size=scaled(1536),
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, head_dim=width // 4,
        num_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    vit = transformers.ViTConfig(
        hidden_size=scaled(1280), intermediate_size=scaled(5120), num_hidden_layers=2, num_attention_heads=4,
        image_size=224, patch_size=14, num_labels=16,
    )  # fmt: skip
    bart = transformers.BartConfig(
        vocab_size=vocabulary, d_model=scaled(1024), encoder_layers=1, decoder_layers=1, encoder_attention_heads=16,
        decoder_attention_heads=16, encoder_ffn_dim=scaled(4096), decoder_ffn_dim=scaled(4096), dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    parts = nn.ModuleDict(
        {
            "dense": llama(width, scaled(5504), 16, vocabulary),
            "moe": transformers.Qwen3MoeForCausalLM(moe),
            "vit": transformers.ViTForImageClassification(vit),
            "seq2seq": transformers.BartForConditionalGeneration(bart),
            "dit": DiffusionBlock(dit_width, 4),
        }
    )
    text = tokens(BATCH, LENGTH)
    pixels = torch.randn(scaled(128), 3, 224, 224)
    labels = torch.zeros(len(pixels), dtype=torch.long)
    patches, condition = torch.randn(scaled(128), 256, dit_width), torch.randn(scaled(128), dit_width)
    long_text = tokens(scaled(64), 1024 if GPU else 32)
    losses = {
        "dense": loss_of("dense", input_ids=text, labels=text),
        "moe": loss_of("moe", input_ids=text, labels=text),
        "vit": loss_of("vit", pixel_values=pixels, labels=labels),
        "seq2seq": loss_of("seq2seq", input_ids=long_text, labels=long_text),
        "dit": lambda: parts["dit"](patches, condition).float().pow(2).mean(),
    }
    return parts, losses


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        program = Program()
        program.models, losses = models()
        tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
        values = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    losses["program"] = lambda: program(tokens, values)
    nvprof_kit.annotate_model(program, depth="leaf")
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-5, fused=True)
    nvprof_kit.annotate_optimizer(optimizer)
    with nvprof_kit.count_flops(sys.argv[1], at_step=1):
        for number in range(3):
            if number == 2 and GPU:
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
            with nvprof_kit.step(number):
                for loss_of in losses.values():
                    with nvprof_kit.phase("forward"):
                        loss = loss_of()
                    with nvprof_kit.phase("backward"):
                        loss.backward()
                    del loss
                optimizer.step()
                optimizer.zero_grad()
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
