"""One measured run of a GPT in plain torch, as in nanoGPT: `python -m benchmarks.nanogpt_peer SPEC.json`.

torch's own linear, layer norm, embedding and fused attention, tied embeddings, no biases in linears, fused
AdamW, clipping; a plain loop.
"""

from __future__ import annotations

from typing import Any

import torch

# torch.optim imports it with the first optimizer; imported here to keep it out of the measured time
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import finish, read_spec, timed
from megalite.config.load import from_dict
from megalite.config.sections.model import ModelConfig


class PlainLayer(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        width, inner = model.hidden_size, model.intermediate_size
        self.heads = model.num_attention_heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, hidden]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden_size)
        self.positions = nn.Embedding(model.max_position_embeddings, model.hidden_size)
        self.blocks = nn.ModuleList(PlainLayer(model) for _ in range(model.num_hidden_layers))
        self.norm = nn.LayerNorm(model.hidden_size)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=model.initializer_range)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    spec = read_spec()
    config = from_dict(spec["config"])
    torch.set_num_threads(spec["threads"])
    torch.set_float32_matmul_precision(spec["matmul"])
    torch.manual_seed(0)
    model, options = GPT(config.model), config.optimizer
    betas = (options.betas[0], options.betas[1])
    optimizer = torch.optim.AdamW(
        model.parameters(), options.lr, betas, options.eps, options.weight_decay, fused=True
    )
    tokens: Any = torch.randint(
        config.model.vocabulary, (config.train.micro_batch_size, config.data.sequence_length + 1)
    )

    def step() -> float:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    seconds = timed(step, spec["warmup_steps"], spec["steps"])
    finish(spec, {"seconds": seconds, "matmul": torch.get_float32_matmul_precision()})


if __name__ == "__main__":
    main()
