"""FLOPs of the model by the usual conventions, from the description of its units.

Only matmuls count, two FLOPs per multiply-add; a backward counts twice its forward. The trainer's
MFU, the partition over stages and the planner read this module. Model FLOPs are those of the PaLM paper
(Chowdhery et al. 2022, appendix B): recomputation does not count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.train import TrainConfig
from megalite.model.cost.recomputed import repeated
from megalite.model.cost.records import MODES, AttentionCost, Matmul, RecurrenceCost, Share, attended_pairs
from megalite.model.cost.units import Units
from megalite.model.mtp.losses import layer_count


class LayerCosts(NamedTuple):
    """FLOPs of one sequence's forward pass.

    The backward of each unit takes twice as many, so the proportions also hold for training.
    """

    layers: list[int]
    embedding: int
    head: int


def layer_costs(model: ModelConfig, sequence_length: int) -> LayerCosts:
    """Return the FLOPs of matmuls and attention (causal, within the layer's window) for each unit.

    Norms, activations and other elementwise kernels do not count; a lookup counts one operation per element
    copied. Modules of multi-token prediction count with the head.
    """
    units = Units(model, Share(sequence_length))
    layers = [units.layer(index).flops for index in range(model.num_hidden_layers)]
    head = units.head().flops
    head += sum(part.flops for loss in units.further_losses() for part in loss)
    return LayerCosts(layers, units.embedding().flops, head)


def model_flops_per_token(model: ModelConfig, sequence_length: int, lora: LoraConfig | None = None) -> float:
    """Return the FLOPs of forward and backward for one token of a sequence.

    Two per multiply-add; backward counts twice the forward; the head counts, the embedding lookup does not.
    Attention counts all positions of the sequence (of the window, if the layer has one), although a causal
    mask needs only half of them: the convention of Megatron-LM and PaLM, so that numbers are comparable.
    Norms, activations and softmax do not count. Frozen weights have no weight gradient.
    """
    return per_token(model, sequence_length, lora=lora).model


Convention = Literal["palm", "causal"]


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward and backward for one token.

    Attributes:
        convention: palm counts all positions for attention (Chowdhery et al. 2022, Megatron-LM), causal only
            those that the mask leaves.
        layers: the matmuls with the layers' weights, those of modules of multi-token prediction included.
        attention: query · key and probabilities · value; recurrences; scores of indexers, and their loss.
        head: the matmul with the vocabulary, once for each token that is predicted.
        embedding: the lookup counted as a matmul with the vocabulary; 0 if it is not counted.
        recomputed: what backward computes again.
    """

    convention: Convention
    layers: float
    attention: float
    head: float
    embedding: float
    recomputed: float

    @property
    def model(self) -> float:
        """FLOPs that the model needs, without recomputation: the basis of MFU."""
        return self.layers + self.attention + self.head + self.embedding

    @property
    def hardware(self) -> float:
        """FLOPs that are computed, with recomputation."""
        return self.model + self.recomputed

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model, "hardware": self.hardware}


class SelectionFlops(NamedTuple):
    """FLOPs of attention for one token, forward and backward, over the pairs that the mask leaves.

    Attributes:
        sparse: of attention to selected rows, with the indexers' scores and loss.
        dense: of the same layers without indexers.
    """

    sparse: float
    dense: float


def selection_flops(model: ModelConfig, sequence_length: int) -> SelectionFlops | None:
    """Return the FLOPs of the layers that attend to selected rows, or None if there are none."""
    units, sparse, dense = Units(model, Share(1)), 0.0, 0.0
    visible = _attended(sequence_length, None, "causal")
    for index in range(model.num_hidden_layers):
        unit = units.layer(index)
        for each in unit.attentions:
            if each.selected:
                sparse += 6 * each.matmul_flops(_attended(sequence_length, each.window, "causal"))
                dense += 6 * each.matmul_flops(visible)
        for scores in unit.selections:
            selected = _attended(sequence_length, scores.top, "causal")
            sparse += scores.token_flops(visible, selected)
    return SelectionFlops(sparse, dense) if dense else None


def _attended(sequence_length: int, window: int | None, convention: Convention) -> float:
    """Return the mean number of positions that a token attends to; at most the window."""
    if convention == "palm" or not sequence_length:
        return min(window or sequence_length, sequence_length)
    return attended_pairs(sequence_length, window) / sequence_length


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
    """Return the FLOPs of one token of a sequence.

    Args:
        recompute: as train.recompute. selective recomputes the scores (query · key), full a layer's whole
            forward.
        embedding: count the embedding as a matmul with the vocabulary, as the rule 6 · parameters does.
        flash: attention runs a kernel that keeps no probabilities: every backward recomputes the scores.
        lora: adapters. Frozen weights have no weight gradient: two matmuls instead of three.
    """
    units = Units(model, Share(1), lora)  # one token
    further = units.further_losses()
    head = (1 + len(further)) * float(sum(matmul.training_flops for matmul in units.head().matmuls))
    layers, attention, recomputed = 0.0, 0.0, 0.0
    layers += sum(matmul.training_flops for loss in further for matmul in loss.joining.matmuls)
    for index in range(layer_count(model)):
        unit = units.layer(index)
        layers += sum(matmul.training_flops for matmul in unit.matmuls)
        scores = sum(
            each.matmul_flops(_attended(sequence_length, each.window, convention)) for each in unit.attentions
        )
        attention += 6 * scores + 3 * sum(each.flops for each in unit.recurrences)
        for each in unit.selections:
            visible, selected = (_attended(sequence_length, limit, convention) for limit in (None, each.top))
            attention += each.token_flops(visible, selected)
        mode = TrainConfig(recompute=recompute).recompute_of(index)
        again = unit.steps if mode == "full" else []
        if mode not in MODES:
            again = repeated(units, index, mode)
        recomputed += sum(step.flops for step in again if isinstance(step, Matmul | RecurrenceCost))
        recomputed += 2 * scores if any(isinstance(step, AttentionCost) for step in again) else 0.0
        if mode == "selective" or "scores" in mode.split("+") or flash:
            recomputed += scores
    return Flops(convention, layers, attention, head, head if embedding else 0.0, recomputed)
