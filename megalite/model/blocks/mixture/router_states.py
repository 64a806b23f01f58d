"""States of a model's routers, and metrics of their load balance.

A step's statistics, summed over all ranks (`balance`), arrive with the gradient norm. Every rank computes the
same new states of all layers from them, so a checkpoint stores them once. A skipped step changes nothing.

The host, which has read the sums, computes the new states and copies them to the device: it does not wait for
the optimizer, which the device runs at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.model.block_module import BlockModule
from megalite.model.blocks.mixture.balance import AUXILIARY, DROPPED, RouterState, Z
from megalite.model.blocks.mixture.block import MixtureOfExperts
from megalite.model.kinds import layers_of
from megalite.model.mtp.losses import layer_count
from megalite.parallel.spec import Rectangle
from megalite.system.pinned_memory import copy_later

KIND = "router"
MTP = "mtp_"  # prefix of the states of MTP modules


class Routers:
    """States of all routers, [layers, experts] fp64 each.

    The state of a layer is a view of them.

    A checkpoint may overwrite the rectangles: the next step reads them from the device once.
    """

    def __init__(self, model: ModelConfig, blocks: Iterable[BlockModule], device: torch.device):
        self.model, self.count = model, layer_count(model)
        self.layers = layers_of(model, "mixture")
        start = RouterState.start(model, device)
        self.load, self.bias = start.load.repeat(self.count, 1), start.bias.repeat(self.count, 1)
        self._host: RouterState | None = None  # a copy in CPU memory; None: to be read from the device
        self.size = self.count * (self.load.shape[1] - AUXILIARY)
        for block in blocks:
            assert isinstance(block, MixtureOfExperts)
            block.balance.state = self.state(block.layer)

    def state(self, layer: int) -> RouterState:
        return RouterState(self.load[layer], self.bias[layer])

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return the routers' statistics of this rank, flattened; zeros without MoE layers."""
        zeros = self.load.new_zeros(self.count, self.load.shape[1] - AUXILIARY)
        return statistics.get("router", zeros).flatten()

    def learn(self, totals: Tensor, tokens: int, applied: bool) -> dict[str, Any]:
        """Learn from a step, and return its metrics.

        Args:
            totals: the layers' statistics, summed over all ranks and flattened.
            tokens: number of valid tokens of the global batch.
            applied: whether the step was applied; routers do not learn from a skipped one.
        """
        rows = totals.view(self.count, -1)
        if self._host is None:
            self._host = RouterState(self.load.to("cpu", copy=True), self.bias.to("cpu", copy=True))
        if applied:
            before = RouterState(*(host[self.layers] for host in self._host))
            learned = before.learned(rows[self.layers, :AUXILIARY], self.model)
            for host, new, device in zip(self._host, learned, (self.load, self.bias), strict=True):
                host[self.layers] = new
                copy_later(host, device)
        # MTP modules count other tokens
        own = [layer for layer in self.layers if layer < self.model.num_hidden_layers]
        return self._metrics(rows[own], self._host.bias, max(tokens, 1))

    def _metrics(self, rows: Tensor, bias: Tensor, tokens: int) -> dict[str, Any]:
        """Return means over the MoE layers.

        Args:
            rows: statistics in CPU memory, [MoE layers, experts + 3].
            bias: the biases of all layers, in CPU memory.
        """
        counts, experts = rows[:, :AUXILIARY], rows.shape[1] + AUXILIARY
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)  # [MoE layers, experts]
        peaks = shares.amax(1) * experts
        largest_entropy = torch.tensor(float(experts)).log().clamp(min=1e-12)
        entropy = -(shares * shares.clamp(min=1e-12).log()).sum(1) / largest_entropy
        metrics = {
            "expert_load_peak": peaks.mean().item(),
            "expert_load_entropy": entropy.mean().item(),
            "expert_load_peaks": peaks.tolist(),
            "router_balance_loss": (rows[:, AUXILIARY].mean() / tokens).item(),
            "router_z_loss": (rows[:, Z].mean() / tokens).item(),
            "dropped_tokens": rows[:, DROPPED].sum().item(),
        }
        if self.model.router_balance == "bias":
            metrics["router_bias_range"] = (bias.amax() - bias.amin()).item()
        return metrics

    def learned(self) -> list[Rectangle]:
        """Return the states that the model computes with.

        These are the biases of the choice, and the loads stored with them.
        """
        return list(self.rectangles()) if self.model.biased_choice else []

    def rectangles(self) -> Iterator[Rectangle]:
        """Yield the states, to save or to fill.

        Those of MTP modules are separate: a run may leave out the modules.
        """
        self._host = None
        for name, values in (("load", self.load), ("bias", self.bias)):
            own, mtp = values.tensor_split((self.model.num_hidden_layers,))
            yield Rectangle(f"{KIND}/{name}", tuple(own.shape), (0, 0), own)
            if len(mtp):
                yield Rectangle(f"{KIND}/{MTP}{name}", tuple(mtp.shape), (0, 0), mtp)


def routers(config: Config, blocks: Iterable[BlockModule], device: torch.device) -> Routers:
    """Return the states of a model's routers, see `BlockKind.statistics`."""
    # Biases are frozen with the weights: PEFT's files of adapters have no place for them.
    frozen = config.lora.rank or config.train.indexer == "warmup"
    rate = 0.0 if frozen else config.model.router_bias_rate
    return Routers(replace(config.model, router_bias_rate=rate), blocks, device)
