"""One measured run in the way of torchtitan (PyTorch): `python -m benchmarks.torchtitan_peer SPEC.json`,
under torchrun.

torchtitan's trainer needs an accelerator, so its training loop is written down here for gloo: its Llama 3, in
which rotary embedding multiplies complex numbers and keys and values are repeated for their heads, under
FSDP2 with its units (embedding, each block, norm with head, the root), clipping by the norm of the sharded
gradients, fused AdamW. Reading of data and metrics are left out, and recomputation, mixed precision and
compilation are off, as they are in the run it is compared with.
"""

from __future__ import annotations

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


class TitanAttention(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.head, self.repeats = model.head_size, model.num_attention_heads // model.kv_heads
        heads, kv_heads = model.num_attention_heads * self.head, model.kv_heads * self.head
        self.q, self.out = (
            nn.Linear(model.hidden_size, heads, bias=False),
            nn.Linear(heads, model.hidden_size, bias=False),
        )
        self.k, self.v = (
            nn.Linear(model.hidden_size, kv_heads, bias=False),
            nn.Linear(model.hidden_size, kv_heads, bias=False),
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:  # [batch, seq, hidden]
        q, k, v = (linear(x).unflatten(-1, (-1, self.head)) for linear in (self.q, self.k, self.v))
        q, k = rotated(q, turns), rotated(k, turns)
        if self.repeats > 1:
            k, v = (each.unsqueeze(3).expand(-1, -1, -1, self.repeats, -1).flatten(2, 3) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding; x [batch, seq, heads, head], turns [seq, head/2]."""
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
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(model), TitanFeedForward(model)
        self.attention_norm, self.ffn_norm = (
            nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, model: ModelConfig, length: int):
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden_size)
        self.blocks = nn.ModuleList(TitanLayer(model) for _ in range(model.num_hidden_layers))
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
    """The last unit is used again at once by backward, so it stays whole."""
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
