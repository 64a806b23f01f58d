"""The recurrences of `recurrence` for the next token of each row, by their definition:

    S ← exp(g) S;  S ← S + β k (v − Sᵀk)ᵀ, or S + k vᵀ without β;  o = Sᵀq

Computed in the type of the states, at least fp32. No communication.
"""

from __future__ import annotations

from torch import Tensor

from megalite_kernels.recurrence import Tokens


def advance(state: Tensor, token: Tokens) -> Tensor:
    """Update the states in place, and return the outputs [1, batch, heads, dv].

    Args:
        state: [batch, heads, dk, dv].
        token: one of each row; it continues the row's document.
    """
    repeats, dtype = token.v.shape[2] // token.k.shape[2], state.dtype
    query, key = (x[0].to(dtype).repeat_interleave(repeats, 1) for x in (token.q, token.k))
    value, decay = token.v[0].to(dtype), token.g[0].to(dtype).exp()
    state.mul_(decay.reshape(*value.shape[:2], -1, 1))  # [batch, heads, 1 or dk, 1]
    if token.beta is not None:
        value = token.beta[0].to(dtype).unsqueeze(-1) * (value - (key.unsqueeze(-2) @ state).squeeze(-2))
    state.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).movedim(2, 0).to(token.v.dtype)
