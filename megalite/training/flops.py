"""How much arithmetic a token costs, and what share of the device's peak a step reaches. Imports no torch.

Model FLOPs, as in the PaLM paper (Chowdhery et al. 2022, appendix B): what the model needs, so recomputation does not count.
"""

from __future__ import annotations

import functools
import re
from math import prod
from pathlib import Path
from typing import Any

from megalite.config.schema import Config, LoraConfig, ModelConfig
from megalite.model.parameters import model_specs

PEAKS = Path(__file__).with_name("peaks.yaml")


def model_flops_per_token(model: ModelConfig, sequence_length: int, lora: LoraConfig | None = None) -> float:
    """FLOPs of forward and backward for one token of a sequence.

    Two a multiply-add; backward counts twice the forward; the head counts, the embedding lookup does not. Attention counts every position
    of the sequence (of the window, where the layer has one), although a causal mask needs only half of them: the convention of Megatron-LM
    and PaLM, under which numbers are comparable. Norms, activations and softmax are left out. Frozen weights have no weight gradient.
    """
    lora, layers = lora or LoraConfig(), model.num_hidden_layers
    projections = {segment.role: segment.shape for spec in model_specs(model, units=[1]) for segment in spec.segments if segment.role}
    weights = layers * sum(map(prod, projections.values())) + model.hidden_size * model.vocabulary
    adapters = layers * lora.rank * sum(sum(shape) for role, shape in projections.items() if lora.adapts(role))
    positions = sum(min(sequence_length, model.window(layer) or sequence_length) for layer in range(layers))
    scores_and_values = 2 * positions * projections["q"][0]  # multiply-adds of query · key and of probabilities · value
    return 2.0 * ((2 if lora.rank else 3) * weights + 3 * (adapters + scores_and_values))


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
    per_rank = tokens_per_second * model_flops_per_token(config.model, config.data.sequence_length, config.lora) / ranks
    peak = peak_flops(device_name, config.train.precision)
    return {"tokens_per_second": tokens_per_second, "tflops_per_gpu": per_rank / 1e12, "mfu": None if peak is None else per_rank / peak}
