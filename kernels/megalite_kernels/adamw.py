"""AdamW (Loshchilov & Hutter 2019) over flat tensors. The reference is torch's fused kernel.

    m ← β1·m + (1 − β1)·g        v ← β2·v + (1 − β2)·g²
    p ← p·(1 − lr·weight_decay) − lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps)

torch's kernel is called directly: constructing any torch.optim optimizer imports torch._dynamo, more than a
second per process.
"""

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: list[Tensor] | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None = None,
) -> None:
    """Update params and both moments in place.

    All tensors are flat. Tensors with the same index have the same length.

    Args:
        grads: may be narrower than params; undefined afterwards.
        weights: the weights in compute precision if params are their master weights: the new params are
            written there, rounded. Without them params are the weights themselves.
        step: 1-based, includes this update.
        grad_scale: the divisor of gradients, [] on their device: a loss scale, 1 / the clipping coefficient,
            or their product. NaN skips the update: nothing changes. So the device makes this decision, and
            the host does not wait for it.
    """
    if not params:
        return
    scale = grad_scale.to(torch.float32) if grad_scale is not None else None
    in_fp32 = all(tensors[0].dtype == torch.float32 for tensors in (params, exp_avgs, exp_avg_sqs))
    if takes_triton(params[0]) and in_fp32:
        from megalite_kernels import adamw_triton

        rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
        scalars = lr * weight_decay, rate, root, eps, 1 - beta1, 1 - beta2
        return adamw_triton.adamw(params, grads, exp_avgs, exp_avg_sqs, weights or [], scale, *scalars)
    # unlike a copy from the host, this does not synchronize
    count = torch.full((), float(step), device=params[0].device)
    skip = None if scale is None else scale.isnan().float()
    parts = [slice(None)]
    if grads[0].dtype != params[0].dtype:
        parts = [slice(index, index + 1) for index in range(len(params))]  # one by one: casts need memory
    for part in parts:
        cast = [grad.to(params[0].dtype) for grad in grads[part]]
        torch._fused_adamw_(
            params[part],
            cast,
            exp_avgs[part],
            exp_avg_sqs[part],
            max_exp_avg_sqs=[],
            state_steps=[count] * len(cast),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=skip,
        )
    if weights:
        torch._foreach_copy_(weights, params)
