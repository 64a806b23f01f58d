"""How many further losses and layers a model has with its MTP modules."""

from __future__ import annotations

from dataclasses import replace

from megalite.config.sections.model import ModelConfig


def further_losses(model: ModelConfig) -> int:
    """Return the number of losses of the head besides that of the next token."""
    return model.mtp_layers


def layer_count(model: ModelConfig) -> int:
    """Return the number of layers, including the layers of MTP modules, which are the last ones."""
    return model.num_hidden_layers + model.mtp_layers


def module_layers(model: ModelConfig) -> range:
    """Return the 0-based indices of the layers of MTP modules."""
    return range(model.num_hidden_layers, layer_count(model))


def without_further_losses(model: ModelConfig) -> ModelConfig:
    """Return the model without its MTP modules, as evaluation and generation use it."""
    return replace(model, mtp_layers=0)
