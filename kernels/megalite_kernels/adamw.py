"""AdamW (Loshchilov & Hutter 2019) over flat tensors, in torch's fused kernel.

    m ← β1·m + (1 − β1)·g        v ← β2·v + (1 − β2)·g²
    p ← p·(1 − lr·weight_decay) − lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps)

The kernel is called directly: constructing any torch.optim optimizer imports torch._dynamo, more than a second a process.
"""

import torch
from torch import Tensor


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None = None,
) -> None:
    """Update params and both moments in place. `step` counts from 1 and includes this update.

    Gradients are divided by `grad_scale` (0-d, on the gradients' device: a loss scale, or 1 / the clipping coefficient, or their
    product) inside the kernel, which also stores the divided gradient back into `grads`.
    """
    if not params:
        return
    count = torch.tensor(float(step), device=params[0].device)
    scale = grad_scale.to(torch.float32) if grad_scale is not None else None
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], [count] * len(params), lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay,
        eps=eps, amsgrad=False, maximize=False, grad_scale=scale, found_inf=None,
    )  # fmt: skip
