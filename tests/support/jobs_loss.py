"""Training with the loss of some tokens at a time, on the pool's ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.training.verify import global_tensors
from tests.support.jobs_training import make_trainer


class LargestLogits(TorchDispatchMode):
    """Remembers the most rows of a tensor whose rows are `width` long."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            rows = isinstance(made, Tensor) and made.dim() > 1 and made.is_contiguous()  # a transposed weight is not
            if rows and made.shape[-1] == self.width:
                self.rows = max(self.rows, made.numel() // self.width)
        return out


def train(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses, gradient norms and weights; validation loss; and the most rows of logits that existed at once."""
    trainer = make_trainer(context, config)
    try:
        head = next((stage.head for stage in trainer.parts.stages.values() if stage.head is not None), None)
        logits = LargestLogits(head.project.weight.tensor.shape[0] if head is not None else -1)
        with logits:
            results = [trainer.step()]
        results += [trainer.step() for _ in range(1, steps)]
        validation = trainer.evaluate()
        scalars = [validation, *(value for result in results for value in (result.loss, result.grad_norm))]
        return {"scalars": scalars, "tensors": global_tensors(trainer), "rows": logits.rows}
    finally:
        trainer.close()
