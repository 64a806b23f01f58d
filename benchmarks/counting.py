"""Counts what the host does in a step: calls of ATen operations, and autograd nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

COUNTED = ("forward", "backward", "views_forward", "views_backward", "nodes")
"""Operations that compute and others, by pass, and autograd nodes. What is outside of a backward counts as
forward, the optimizer too."""
_NODE = "autograd::engine::evaluate_function: "
_NO_KERNEL = {
    *("_unsafe_view", "_reshape_alias", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
_NO_TENSOR = {"promote_types", "result_type", "can_cast"}  # no operation in any sense


class StepCounter(TorchDispatchMode):
    """Counts the operations that reach the dispatcher below autograd, as `COUNTED` has them.

    One call is one operation, whatever it calls itself: a fused optimizer's update of all tensors is one.
    Views and allocations run no kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and name not in _NO_TENSOR:
            self.count(no_kernel=function.is_view or name in _NO_KERNEL)
        return function(*args, **(kwargs or {}))

    def count(self, no_kernel: bool = False) -> None:
        """Count an operation in the pass that is running."""
        name = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        self.counts[f"views_{name}" if no_kernel else name] += 1


def counts(step: Callable[[], object], operations: StepCounter | None = None) -> dict[str, int]:
    """Return the counts of one call.

    Args:
        operations: counts them; default: a new one.
    """
    operations = operations or StepCounter()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, operations:
        step()
    nodes = sum(event.name.startswith(_NODE) for event in recorded.events())
    return {name: operations.counts[name] for name in COUNTED} | {"nodes": nodes}


def of_a_layer(deep: Mapping[str, float], shallow: Mapping[str, float], layers: int) -> dict[str, float]:
    """Return the counts of one layer, from those of two models that differ in a number of layers."""
    return {name: (deep[name] - shallow[name]) / layers for name in deep}
