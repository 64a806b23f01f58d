"""How much arithmetic a token costs, and what share of the device's peak a step reaches. Imports no torch.

Model FLOPs, as in the PaLM paper (Chowdhery et al. 2022, appendix B): what the model needs, so recomputation does not count.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from megalite.config.schema import Config, ModelConfig

PEAKS = Path(__file__).with_name("peaks.yaml")


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token of a sequence.

    Two a multiply-add; backward counts twice the forward; the head counts, the embedding lookup does not. Attention counts every position
    of the sequence (of the window, where the layer has one), although a causal mask needs only half of them: the convention of Megatron-LM
    and PaLM, under which numbers are comparable. Norms, activations and softmax are left out.
    """
    hidden, heads_width = model.hidden_size, model.num_attention_heads * model.head_size
    projections = 2 * hidden * heads_width + 2 * hidden * model.kv_heads * model.head_size  # query and output, key and value
    feed_forward = (3 if model.gated_mlp else 2) * hidden * model.intermediate_size
    weights = model.num_hidden_layers * (projections + feed_forward) + hidden * model.vocabulary
    positions = sum(min(sequence_length, model.window(layer) or sequence_length) for layer in range(model.num_hidden_layers))
    scores_and_values = 2 * positions * heads_width  # multiply-adds of query · key and of probabilities · value
    return 3.0 * 2.0 * (weights + scores_and_values)


@functools.cache
def _peaks() -> dict[str, float]:
    import yaml

    found: dict[str, float] = yaml.safe_load(PEAKS.read_text())
    return found


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's dense peak in FLOP/s, or None where it is not known: CPUs, and precisions other than bf16 and fp16."""
    if precision not in ("bf16", "fp16"):
        return None
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((tera * 1e12 for name, tera in _peaks().items() if words.issuperset(name.split())), None)


def throughput(config: Config, seconds: float, ranks: int, device_name: str) -> dict[str, Any]:
    """What a step of `seconds` achieved, by the names of metrics. Every token of the batch is computed, so every token counts, masked ones
    included."""
    tokens_per_second = config.train.global_batch_size * config.data.sequence_length / seconds
    per_rank = tokens_per_second * model_flops_per_token(config.model, config.data.sequence_length) / ranks
    peak = peak_flops(device_name, config.train.precision)
    return {"tokens_per_second": tokens_per_second, "tflops_per_gpu": per_rank / 1e12, "mfu": None if peak is None else per_rank / peak}
