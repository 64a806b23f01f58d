"""FLOPs of one token, by the conventions in use: what the model needs, and what the hardware computes for it. Imports no torch.

Everything rests on `megalite.training.flops`, which the trainer's MFU uses: matrix products alone, two FLOPs a multiply-add, a backward
counts twice its forward.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megalite.config.schema import LoraConfig, ModelConfig, TrainConfig
from megalite.training.flops import model_flops_per_token

Convention = Literal["palm", "causal"]


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward and backward for one token.

    Attributes:
        convention: palm counts every position for attention (Chowdhery et al. 2022, Megatron-LM), causal those that the mask leaves.
        layers: the matrix products with the layers' weights.
        attention: query · key and probabilities · value.
        head: the product with the vocabulary.
        embedding: what the lookup would cost as a product, where it is counted; else 0.
        recomputed: what backward computes a second time.
    """

    convention: Convention
    layers: float
    attention: float
    head: float
    embedding: float
    recomputed: float

    @property
    def model(self) -> float:
        """What the model needs: recomputation does not count. MFU is measured by this."""
        return self.layers + self.attention + self.head + self.embedding

    @property
    def hardware(self) -> float:
        """What is computed."""
        return self.model + self.recomputed

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model, "hardware": self.hardware}


def attended(model: ModelConfig, layer: int, sequence_length: int, convention: Convention) -> float:
    """Positions that a token attends to in a layer, in the mean over the sequence; the layer's window bounds them."""
    window = min(model.window(layer) or sequence_length, sequence_length)
    if convention == "palm" or not sequence_length:
        return window
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length


def per_token(
    model: ModelConfig,
    sequence_length: int,
    convention: Convention = "palm",
    recompute: str = "none",
    *,
    embedding: bool = False,
    flash: bool = False,
    lora: LoraConfig | None = None,
) -> Flops:
    """FLOPs of one token of a sequence.

    Args:
        recompute: as train.recompute. selective computes the scores again (query · key), full a layer's whole forward.
        embedding: count the embedding as a product with the vocabulary, as 6 · parameters does.
        flash: attention runs a kernel that keeps no probabilities: every backward computes the scores again.
        lora: adapters. What they freeze has no weight gradient: two products instead of three.
    """
    products = 2 if lora is not None and lora.rank else 3
    vocabulary = 2.0 * products * model.hidden_size * model.vocabulary
    layers = model_flops_per_token(model, 0, lora) - vocabulary
    whole = model_flops_per_token(model, 0) - 6.0 * model.hidden_size * model.vocabulary
    forward = (whole + layers - whole * products / 3) / 3  # adapters, the difference, are trained
    width = model.num_attention_heads * model.head_size
    attention, recomputed = 0.0, 0.0
    for layer in range(model.num_hidden_layers):
        product = 2 * attended(model, layer, sequence_length, convention) * width
        attention += 6 * product
        mode = TrainConfig(recompute=recompute).recompute_of(layer)
        if mode == "full":
            recomputed += forward / model.num_hidden_layers + 2 * product
        if mode == "selective" or flash:
            recomputed += product
    return Flops(convention, layers, attention, vocabulary, vocabulary if embedding else 0.0, recomputed)
