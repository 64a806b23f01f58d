"""What the routers of a model have learned from earlier steps, and the metrics of their balance.

The sums over all ranks of a step's statistics (`parallel.expert.balance`) arrive with the gradient norm.
Every rank learns from them the same for all layers, so a checkpoint stores them once. A skipped step changes
nothing.

The host computes what is learned, since it has read the sums, and copies it to the device: it does not wait
for the optimizer, which the device runs at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.model.parameters import layer_count
from megalite.model.stage import Stage
from megalite.parallel.expert.balance import AUXILIARY, DROPPED, RouterState, Z
from megalite.parallel.spec import Rectangle
from megalite.system.pinned_memory import copy_later

KIND = "router"
AHEAD = "mtp_"  # begins the names of the states of modules of multi-token prediction


class Routers:
    """The states of all routers, [layers, experts] fp64 each, of which a layer's own state is a view.

    What is given out as rectangles may be overwritten, by a checkpoint: the next step then reads it from the
    device once.
    """

    def __init__(self, model: ModelConfig, stages: Iterable[Stage], device: torch.device):
        from megalite.model.moe import MixtureOfExperts

        self.model, self.count = model, layer_count(model)
        self.layers = [layer for layer in range(self.count) if model.is_mixture(layer)]
        start = RouterState.start(model, device)
        self.load, self.bias = (each.repeat(self.count, 1) for each in (start.load, start.bias))
        self._host: RouterState | None = None  # the same in CPU memory; None: to be read from the device
        for module in (module for stage in stages for module in stage.modules()):
            if isinstance(module, MixtureOfExperts):
                module.balance.state = self.state(module.layer)

    def state(self, layer: int) -> RouterState:
        return RouterState(self.load[layer], self.bias[layer])

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        """The routers' part of this rank's statistics, flattened; zeros where its layers have no mixtures."""
        none = self.load.new_zeros(self.count, self.load.shape[1] - AUXILIARY)
        return statistics.get("router", none).flatten()

    def learn(self, totals: Tensor | None, tokens: int, applied: bool) -> dict[str, Any]:
        """Learn from a step that was applied. Returns its metrics.

        Args:
            totals: the layers' statistics, summed over all ranks and flattened.
            tokens: valid tokens of the global batch.
        """
        assert totals is not None, "the totals of a step are known before it is learned from"
        rows = totals.view(self.count, -1)
        if self._host is None:
            self._host = RouterState(self.load.to("cpu", copy=True), self.bias.to("cpu", copy=True))
        if applied:
            before = RouterState(*(host[self.layers] for host in self._host))
            learned = before.learned(rows[self.layers, :AUXILIARY], self.model)
            for host, new, device in zip(self._host, learned, (self.load, self.bias), strict=True):
                host[self.layers] = new
                copy_later(host, device)
        # the others count tokens further ahead
        own = [layer for layer in self.layers if layer < self.model.num_hidden_layers]
        return self._metrics(rows[own], self._host.bias, max(tokens, 1))

    def _metrics(self, rows: Tensor, bias: Tensor, tokens: int) -> dict[str, Any]:
        """Means over the mixtures: rows [mixtures, experts + 3], and the biases of all layers, in CPU
        memory."""
        counts, experts = rows[:, :AUXILIARY], rows.shape[1] + AUXILIARY
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)  # [mixtures, experts]
        peaks = shares.amax(1) * experts
        entropy = -(shares * shares.clamp(min=1e-12).log()).sum(1) / torch.tensor(float(experts)).log().clamp(
            min=1e-12
        )
        found = {
            "expert_load_peak": peaks.mean().item(),
            "expert_load_entropy": entropy.mean().item(),
            "expert_load_peaks": peaks.tolist(),
            "router_balance_loss": (rows[:, AUXILIARY].mean() / tokens).item(),
            "router_z_loss": (rows[:, Z].mean() / tokens).item(),
            "dropped_tokens": rows[:, DROPPED].sum().item(),
        }
        if self.model.router_balance == "bias":
            found["router_bias_range"] = (bias.amax() - bias.amin()).item()
        return found

    def learned(self) -> list[Rectangle]:
        """What the model computes with: the biases of the choice, with which the loads are stored."""
        return list(self.rectangles()) if self.model.biased_choice else []

    def rectangles(self) -> Iterator[Rectangle]:
        """The states, to save or to fill: those of the modules by themselves, for a run may leave the modules
        out."""
        self._host = None
        for name, values in (("load", self.load), ("bias", self.bias)):
            own, ahead = values.split((self.model.num_hidden_layers, self.model.mtp_layers))
            yield Rectangle(f"{KIND}/{name}", tuple(own.shape), (0, 0), own)
            if len(ahead):
                yield Rectangle(f"{KIND}/{AHEAD}{name}", tuple(ahead.shape), (0, 0), ahead)
