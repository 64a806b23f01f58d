"""What the model computes, unit by unit, from the configuration alone: FLOPs by the conventions in use. Imports no torch.

Matrix products alone, two FLOPs a multiply-add; a backward counts twice its forward. The trainer's MFU, the partition over stages and the
planner's times all read this module. Model FLOPs are those of the PaLM paper (Chowdhery et al. 2022, appendix B): what the model needs, so
recomputation does not count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from megalite.config.schema import LoraConfig, ModelConfig, TrainConfig
from megalite.model.parameters import model_specs


class LayerCosts(NamedTuple):
    """FLOPs of one sequence's forward pass; backward takes twice as many everywhere, so the proportions hold for training."""

    layers: list[int]
    embedding: int
    head: int


def layer_costs(model: ModelConfig, sequence_length: int) -> LayerCosts:
    """Costs from the configuration alone: matrix products, and the attended pairs of positions (causal, within the layer's window).

    Norms, activations and other elementwise work are left out; a lookup counts one operation for each element it copies.
    """
    hidden = model.hidden_size
    query, key_value = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    projections = hidden * (2 * query + 2 * key_value)
    feed_forward = hidden * model.intermediate_size * (3 if model.gated_mlp else 2)

    def layer(index: int) -> int:
        window = min(model.window(index) or sequence_length, sequence_length)
        pairs = window * (window + 1) // 2 + (sequence_length - window) * window
        return 2 * sequence_length * (projections + feed_forward) + 4 * pairs * query

    layers = [layer(index) for index in range(model.num_hidden_layers)]
    return LayerCosts(layers, sequence_length * hidden, 2 * sequence_length * hidden * model.vocabulary)


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
