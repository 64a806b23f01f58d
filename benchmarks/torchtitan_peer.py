"""One measured run as in torchtitan (PyTorch): `python -m benchmarks.torchtitan_peer SPEC.json`.

Run it under torchrun. torchtitan's trainer requires an accelerator, so its training loop is reimplemented
here for gloo: its Llama 3, in which rotary embedding multiplies complex numbers and keys and values are
repeated for their heads, under FSDP2 with its units (embedding, each block, norm with head, the root),
clipping by the norm of the sharded gradients, and fused AdamW. Data loading and metrics are omitted, and
recomputation, mixed precision and compilation are off, as in the run it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# torch.optim imports it with the first optimizer; imported here to keep it out of the measured time
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.sharded_peer import Peer, adamw_options
from megalite.config.sections.model import ModelConfig


class SeparateProjections(nn.Module):
    """Queries, keys and values by a product each, as in torchtitan up to 0.2."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.head = model.head_size
        heads, kv_heads = model.num_attention_heads * self.head, model.kv_heads * self.head
        self.q = nn.Linear(model.hidden_size, heads, bias=False)
        self.k, self.v = (nn.Linear(model.hidden_size, kv_heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return (linear(x).unflatten(-1, (-1, self.head)) for linear in (self.q, self.k, self.v))


class OneProjection(nn.Module):
    """Queries, keys and values by one product, grouped by key-value head and then copied, as since 0.3."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.head, self.parts = model.head_size, [model.num_attention_heads // model.kv_heads, 1, 1]
        self.qkv = nn.Linear(model.hidden_size, model.kv_heads * sum(self.parts) * self.head, bias=False)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        groups = self.qkv(x).unflatten(-1, (-1, sum(self.parts), self.head))
        return (part.flatten(2, 3).contiguous() for part in groups.split(self.parts, -2))


class TitanAttention(nn.Module):
    def __init__(self, model: ModelConfig, projections: type[nn.Module]):
        super().__init__()
        self.repeats = model.num_attention_heads // model.kv_heads
        self.qkv = projections(model)
        self.out = nn.Linear(model.num_attention_heads * model.head_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:  # [batch, seq, hidden]
        q, k, v = self.qkv(x)  # [batch, seq, heads, head] each
        q, k = rotated(q, turns), rotated(k, turns)
        if self.repeats > 1:
            k, v = (each.unsqueeze(3).expand(-1, -1, -1, self.repeats, -1).flatten(2, 3) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Apply rotary embedding to x [batch, seq, heads, head], with turns [seq, head/2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).type_as(x)


class TitanFeedForward(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        width, inner = model.hidden_size, model.intermediate_size
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TitanLayer(nn.Module):
    def __init__(self, model: ModelConfig, projections: type[nn.Module]):
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(model, projections), TitanFeedForward(model)
        self.attention_norm, self.ffn_norm = (
            nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, model: ModelConfig, length: int, projections: type[nn.Module] = SeparateProjections):
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden_size)
        self.blocks = nn.ModuleList(TitanLayer(model, projections) for _ in range(model.num_hidden_layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.head = nn.Linear(model.hidden_size, model.vocabulary, bias=False)
        angles = torch.outer(
            torch.arange(length).float(),
            model.rope_theta ** -(torch.arange(0, model.head_size, 2) / model.head_size),
        )
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))


def sharded(model: Llama) -> Llama:
    """Apply FSDP2. The last unit is not resharded, because the backward uses it immediately."""
    fully_shard(model.tokens)
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.head], reshard_after_forward=False)
    fully_shard(model)
    return model


def main() -> None:
    peer = Peer()
    config = peer.config
    model = sharded(Llama(config.model, config.data.sequence_length))
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(config))
    torch.manual_seed(dist.get_rank())
    rows: Any = torch.randint(
        config.model.vocabulary, (config.train.micro_batch_size, config.data.sequence_length + 1)
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip, foreach=True)
        optimizer.step()

    peer.measure(step)


if __name__ == "__main__":
    main()
