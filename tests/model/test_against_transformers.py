"""The same weights in transformers, with torch.optim.AdamW and a plain loop: 20 losses and gradient norms within 1e-5
(fp32), 12 of mixtures of experts.

transformers computes parts of its norms in fp32 whatever the precision, so fp32 is the one to compare in.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.data.indexed import IndexedTokens
from megalite.families.model_config import from_hf_config
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import STEPS, write_tokens

SEQUENCE, BATCH, VOCAB, LR, DECAY = 24, 8, 101, 3e-4, 0.1

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, GQA": ("Llama", LLAMA),
    "llama, llama3 rope, tied": (
        "Llama",
        {**LLAMA, "tie_word_embeddings": True, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500.0}},
    ),
    "llama, linear rope": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "qwen2, biases": ("Qwen2", {**LLAMA, "tie_word_embeddings": False}),
    "qwen3, qk-norm, head_dim": ("Qwen3", {**LLAMA, "head_dim": 24, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHead",
        {
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 32,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
    ),
}
# their auxiliary loss is pooled over layers
EXPERTS = {**LLAMA, "hidden_size": 48, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [1]},
    ),
}
MIXTURE_STEPS = 12
NAMES = {
    **{
        "experts.gate_up_proj": "experts.in.weight",
        "experts.down_proj": "experts.down.weight",
        "mlp.gate.weight": "mlp.router.weight",
    },
    **{"model.embed_tokens": "embedding", "model.layers": "layers", "model.norm": "norm", "lm_head": "head"},
    **{"self_attn": "attention", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"},
    **{
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
        "post_attention_layernorm": "mlp_norm",
        "input_layernorm": "input_norm",
    },
    **{
        "transformer.wte": "embedding",
        "transformer.wpe": "positions",
        "transformer.h": "layers",
        "transformer.ln_f": "norm",
    },
    **{
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
        "ln_1": "input_norm",
        "ln_2": "mlp_norm",
    },
}


def our_tensors(model: Any, gpt2: bool) -> dict[str, Tensor]:
    """transformers' weights under our names; GPT-2 stores its linears transposed, and q, k and v as one."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.flatten(0, -2) if value.dim() == 3 else value  # the experts of a layer
        if gpt2 and value.dim() == 2 and "c_" in name:
            value = value.t()
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "attn.c_attn" in name:
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                tensors[name.replace("attn.c_attn", f"attention.{part}")] = piece.contiguous()
        else:
            tensors[name] = value.contiguous()
    return {
        name: value.clone()
        for name, value in tensors.items()
        if name != "head.weight" or not model.config.tie_word_embeddings
    }


def plain_loop(model: Any, tokens: Tensor, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """torch's AdamW and clipping on transformers' model; biases and norms do not decay."""
    decaying = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() < 2]
    groups = [{"params": decaying, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(steps):
        rows = torch.stack([tokens[(step * BATCH + row) * SEQUENCE :][: SEQUENCE + 1] for row in range(BATCH)])
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def make_trainer(model: Any, prefix: str, directory: str, tensors: dict[str, Tensor], **train: Any) -> Trainer:
    config = from_dict(
        {
            "run": {"dir": directory, "name": "hf"},
            "model": from_hf_config(model.config.to_dict()),
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
            "train": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": BATCH, "grad_clip": 1.0, **train},
            "optimizer": {"lr": LR, "decay": "constant", "weight_decay": DECAY, "eps": 1e-8},
            "checkpoint": {"load": "none"},
        }
    )
    trainer = Trainer(config, make_mesh(config))

    for part in trainer.store.to_load():  # without padding, which stays zero
        rows = tuple(slice(low, low + size) for low, size in zip(part.offsets, part.tensor.shape, strict=True))
        part.tensor.copy_(tensors[part.name.removeprefix("weight/")][rows])
    trainer.store.publish()
    return trainer


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), VOCAB)


@pytest.mark.parametrize("case", CASES | MIXTURES)
def test_trains_like_transformers(case, prefix, tmp_path):
    import transformers

    (family, fields), steps = (CASES | MIXTURES)[case], MIXTURE_STEPS if case in MIXTURES else STEPS
    gpt2 = family.startswith("GPT2")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.removesuffix('LMHead')}Config")(
        vocab_size=VOCAB, **fields, attn_implementation="eager"
    )
    model = getattr(transformers, f"{family}Model" if gpt2 else f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for value in model.parameters():  # ones and zeros would hide a weight that is ignored
            value.add_(torch.randn_like(value), alpha=0.05)
    trainer = make_trainer(model, prefix, str(tmp_path), our_tensors(model, gpt2))
    ours = [trainer.step() for _ in range(steps)]
    trainer.close()
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens.astype("int64"))
    losses, norms = plain_loop(model, tokens, steps)
    assert [result.loss for result in ours] == pytest.approx(losses, rel=1e-5)
    assert [result.grad_norm for result in ours] == pytest.approx(norms, rel=1e-5)
    for name, value in our_tensors(model, gpt2).items():
        assert (global_tensors(trainer)[f"weight/{name}"] - value).abs().max() <= 2e-5, name
