"""The implementations of attention on a GPU, what each supports, and which one runs.

torch's call of cuDNN over documents is none of them: its forward pass writes the log-sum-exp where its
backward pass does not read it (torch 2.11, wrong gradients on an H200), and each call builds a plan.

`ROUTES` is in default order: the first that supports a call runs it. A guarded route runs only where the
device's file names it (`device_routes`): it was never run, or it was not the fastest. CPU tensors do not use
these routes (`attention`), and no route supports attention sinks.

    cudnn, flash      the kernels that come with torch, for plain causal attention: cuDNN's on Hopper and
                      Blackwell, and FlashAttention-2
    fa3, fa3_varlen   FlashAttention-3, if the package flash_attn_interface is installed; it then replaces
                      FlashAttention-2 in this process
    flash_varlen      FlashAttention-2 over documents of any length, given by their boundaries
    triton            `attention_triton`: supports every option, in a fixed order of additions
    reference         plain torch (`attention`): supports every option, with memory for the scores of a block
                      of queries
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda

from megalite_kernels import attention_library as library
from megalite_kernels.backend import takes_triton
from megalite_kernels.device_routes import measured
from megalite_kernels.launch import architecture

WIDEST = 256  # channels of a head
HALF = (torch.float16, torch.bfloat16)
HOPPER, HOPPER_AND_BLACKWELL = ("sm_90",), ("sm_90", "sm_100")


class AttentionCall(NamedTuple):
    """An attention call: its tensors, [S, B, heads, D], and which options it has."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: bool = False
    documents: bool = False
    boundaries: bool = False
    softcap: bool = False
    dropout: bool = False


def _torch_rejects(check: str) -> Callable[[AttentionCall], str | None]:
    """Return `Route.rejects` by torch's own check, a function of `torch.backends.cuda`."""

    def reason(call: AttentionCall) -> str | None:
        q, k, v = map(library.by_head, (call.q, call.k, call.v))
        parameters = cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
        return None if getattr(cuda, check)(parameters) else "torch rejects it"

    return reason


@functools.cache
def _fa3_missing(_: AttentionCall | None = None) -> str | None:
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot use it"
    installed = importlib.util.find_spec("flash_attn_interface") is not None
    return None if installed else "flash_attn_interface is not installed"


def _triton_rejects(call: AttentionCall) -> str | None:
    return None if takes_triton(call.q) else "train.kernels = torch, or no Triton"


@dataclass(frozen=True)
class Route:
    """An implementation of attention, and the calls that it supports.

    Attributes:
        calls: its forward and backward; None: `attention` has them.
        for_documents: True: only calls with documents, whose boundaries it needs; False: only calls without;
            None: both.
        windows, softcap, dropout: whether it supports this option.
        dtypes: element types.
        widest: most channels of a head.
        channels: number of which the channels of a head must be a multiple.
        positions: number of which the sequence length must be a multiple.
        grouped: whether there may be fewer key-value heads than query heads.
        fixed_order: whether the backward pass adds in the same order in every run.
        architectures: the `launch.ARCHITECTURES` that it runs on; empty: all.
        guarded: it runs only where the device's file names it.
        rejects: returns another reason why it does not support a call, or None.
    """

    name: str
    calls: library.Calls | None = None
    for_documents: bool | None = None
    windows: bool = False
    softcap: bool = False
    dropout: bool = False
    dtypes: tuple[torch.dtype, ...] = HALF
    widest: int = WIDEST
    channels: int = 8
    positions: int = 1
    grouped: bool = True
    fixed_order: bool = False
    architectures: tuple[str, ...] = ()
    guarded: bool = False
    rejects: Callable[[AttentionCall], str | None] = lambda call: None

    def rejection(self, call: AttentionCall) -> str | None:
        """Return why this route does not support a call, or None if it does."""
        sequence, _, heads, dim = call.q.shape
        documents = "with documents" if call.documents else "without documents"
        deterministic = torch.are_deterministic_algorithms_enabled()
        runs_here = not self.architectures or architecture(call.q.device) in self.architectures
        for supported, reason in (
            (self.for_documents in (None, call.documents), documents),
            (not self.for_documents or call.boundaries, "the boundaries of the documents are not known"),
            (self.windows or not call.window, "a sliding window"),
            (self.softcap or not call.softcap, "a soft-cap of scores"),
            (self.dropout or not call.dropout, "dropout"),
            (self.calls is None or call.q.numel() > 0, "there are no elements"),
            (call.q.dtype in self.dtypes, f"{call.q.dtype}"),
            (dim <= self.widest and dim % self.channels == 0, f"{dim} channels a head"),
            (sequence % self.positions == 0, f"{sequence} positions are no multiple of {self.positions}"),
            (self.grouped or heads == call.k.shape[2], "fewer key-value heads than query heads"),
            (self.fixed_order or not deterministic, "run.deterministic"),
            (runs_here, "the GPU's architecture"),
        ):
            if not supported:
                return reason
        return self.rejects(call)


ROUTES = (
    # More than 128 channels: a backward exists only in some versions, which torch's check does not see.
    # Sequences that are no multiple of 128: cuDNN before 9.15.1 reads beyond them, later ones have returned
    # NaN for dq.
    Route(
        "cudnn",
        library.CUDNN,
        for_documents=False,
        widest=128,
        positions=128,
        architectures=HOPPER_AND_BLACKWELL,
        rejects=_torch_rejects("can_use_cudnn_attention"),
    ),
    Route("flash", library.FLASH, for_documents=False, rejects=_torch_rejects("can_use_flash_attention")),
    Route("fa3", library.FA3, for_documents=False, architectures=HOPPER, guarded=True, rejects=_fa3_missing),
    Route("flash_varlen", library.FLASH_VARLEN, for_documents=True, windows=True, guarded=True),
    Route(
        "fa3_varlen",
        library.FA3_VARLEN,
        for_documents=True,
        windows=True,
        architectures=HOPPER,
        guarded=True,
        rejects=_fa3_missing,
    ),
    Route(
        "triton",
        windows=True,
        softcap=True,
        dropout=True,
        channels=1,
        fixed_order=True,
        rejects=_triton_rejects,
    ),
    Route(
        "reference",
        windows=True,
        softcap=True,
        dropout=True,
        dtypes=(*HALF, torch.float32, torch.float64),
        widest=1 << 30,
        channels=1,
        fixed_order=True,
    ),
)
BY_NAME = {route.name: route for route in ROUTES}


def choose(call: AttentionCall) -> Route:
    """Return the route of a call on a GPU.

    It is the route that was measured to be the fastest, or else the first that supports the call.
    """
    routes = measured(call.q.device)
    fastest = routes.documents if call.documents else routes.plain
    if fastest is not None and BY_NAME[fastest].rejection(call) is None:
        return BY_NAME[fastest]
    return next(route for route in ROUTES if not route.guarded and route.rejection(call) is None)


def describe(call: AttentionCall) -> str:
    """Return the route of a call and the reason for it, as text."""
    routes, chosen = measured(call.q.device), choose(call)
    fastest = routes.documents if call.documents else routes.plain
    kind = "attention with documents" if call.documents else "attention"
    if chosen.name == fastest:
        return f"{kind}: {chosen.name}, measured to be the fastest on {routes.device}"
    rejected = [BY_NAME[fastest]] if fastest is not None else []
    for route in ROUTES[: ROUTES.index(chosen)]:
        if not route.guarded and route.for_documents in (None, call.documents):
            rejected.append(route)
    reasons = [f"not {route.name} ({route.rejection(call)})" for route in rejected]
    if routes.problem:
        reasons.append(routes.problem)
    elif not fastest:
        reasons.append("no routes were measured on this device")
    return "; ".join([f"{kind}: {chosen.name}", *reasons])
