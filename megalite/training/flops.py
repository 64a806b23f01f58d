"""How much arithmetic a token costs, and what share of the device's peak a step reaches. Imports no torch.

Model FLOPs, as in the PaLM paper (Chowdhery et al. 2022, appendix B): what the model needs, so recomputation does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megalite.config.schema import Config, ModelConfig

# Dense 16-bit tensor-core peaks with fp32 accumulation, in TFLOP/s, from the vendors' data sheets (half of what they print "with
# sparsity"). The first row whose words all occur in the device's name applies.
PEAK_TFLOPS = (
    ("GB300", 2500),
    ("GB200", 2500),
    ("B300", 2250),
    ("B200", 2250),
    ("B100", 1750),
    ("GH200", 989),
    ("H200 NVL", 835),
    ("H200", 989),
    ("H100 PCIE", 756),
    ("H100 NVL", 835),
    ("H100", 989),
    ("H800 PCIE", 756),
    ("H800", 989),
    ("H20", 148),
    ("A100", 312),
    ("A800", 312),
    ("A30", 165),
    ("A40", 150),
    ("A10", 125),
    ("L40S", 362),
    ("L40", 181),
    ("L4", 121),
    ("RTX 5090", 209),
    ("RTX 4090", 165),
    ("RTX 3090", 71),
    ("MI355X", 2516),
    ("MI325X", 1307),
    ("MI300X", 1307),
    ("MI250X", 383),
)


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


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's dense peak in FLOP/s, or None where it is not known: CPUs, and precisions other than bf16 and fp16."""
    if precision not in ("bf16", "fp16"):
        return None
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((tera * 1e12 for name, tera in PEAK_TFLOPS if words.issuperset(name.split())), None)


@dataclass(frozen=True)
class Throughput:
    """What a step of `seconds` achieved. Every token of the batch is computed, so every token counts, masked ones included."""

    tokens_per_second: float  # over all ranks
    tflops_per_gpu: float  # model FLOPs
    mfu: float | None  # share of the device's peak; None where that is not known


def throughput(config: Config, seconds: float, ranks: int, device_name: str) -> Throughput:
    tokens_per_second = config.train.global_batch_size * config.data.sequence_length / seconds
    per_rank = tokens_per_second * model_flops_per_token(config.model, config.data.sequence_length) / ranks
    peak = peak_flops(device_name, config.train.precision)
    return Throughput(tokens_per_second, per_rank / 1e12, None if peak is None else per_rank / peak)
