"""Counts what the host does in a step: calls of ATen operations, and autograd nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

COUNTED = tuple(
    f"{kind}_{name}" for kind in ("operations", "views", "kernels") for name in ("forward", "backward")
)
"""Operations that compute, views and allocations, and launches of own kernels, by pass. What is outside of a
backward counts as forward, the optimizer too."""
_NODE = "autograd::engine::evaluate_function: "
_NO_KERNEL = {
    *("_unsafe_view", "_reshape_alias", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
_NO_TENSOR = {"promote_types", "result_type", "can_cast"}  # no operation in any sense


class StepCounter(TorchDispatchMode):
    """Counts the operations of ATen that reach the dispatcher below autograd.

    One call is one operation, whatever it calls itself: a fused optimizer's update of all tensors is one.
    Views and allocations run no kernel.

    Attributes:
        counts: by the names in `COUNTED`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and name not in _NO_TENSOR:
            self.count("views" if function.is_view or name in _NO_KERNEL else "operations")
        return function(*args, **(kwargs or {}))

    def count(self, kind: str) -> None:
        """Count one operation, view or kernel in the pass that is running."""
        name = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        self.counts[f"{kind}_{name}"] += 1


def counts(step: Callable[[], object], counter: StepCounter | None = None) -> dict[str, int]:
    """Return what one call counts, by the names in `COUNTED`, and the autograd `nodes` that it runs.

    Args:
        counter: counts operations; default: a new one.
    """
    counter = counter or StepCounter()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, counter:
        step()
    nodes = sum(event.name.startswith(_NODE) for event in recorded.events())
    return {name: counter.counts[name] for name in COUNTED} | {"nodes": nodes}


def of_a_layer(deep: Mapping[str, float], shallow: Mapping[str, float], layers: int) -> dict[str, float]:
    """Return the counts of one layer, from those of two models that differ in a number of layers."""
    return {name: (deep[name] - shallow[name]) / layers for name in deep}
