"""The fastest routes of a device, as measured there.

They are stored in routes/<device>.json, which `megalite first-light` writes.

    {"attention": {"plain": "cudnn", "documents": "flash_varlen"}, "weight_grad": "addmm",
     "router": "out_dtype", "measured": {…}}

A device without a file has the default order of each table of routes (`attention_routes.ROUTES`). A file that
cannot be read, or that names no known route, changes nothing, and the run says so at its start.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite_kernels import backend

DIRECTORY = Path(__file__).with_name("routes")
KINDS = ("weight_grad", "router", "fp8_block", "fp8_mxfp8", "delta", "channel", "scan", "convolution")
"""Kinds of operations besides attention."""


@dataclass(frozen=True)
class DeviceRoutes:
    """Fastest routes of a device; None selects the default order.

    Attributes:
        device: its name.
        plain, documents: routes of attention.
        weight_grad: route of `weight_grad`.
        router: route of `router_logits`.
        fp8_block, fp8_mxfp8: routes of `fp8_matmul`, by recipe.
        delta, channel, scan, convolution: routes of `recurrence` and `causal_conv` (`state_library`).
        problem: the reason why the file is ignored.
    """

    device: str = ""
    plain: str | None = None
    documents: str | None = None
    weight_grad: str | None = None
    router: str | None = None
    fp8_block: str | None = None
    fp8_mxfp8: str | None = None
    delta: str | None = None
    channel: str | None = None
    scan: str | None = None
    convolution: str | None = None
    problem: str | None = None


def path_of(device: str) -> Path:
    """Return the file of a device with the name that torch reports."""
    return DIRECTORY / (re.sub("[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def read(device: str) -> DeviceRoutes:
    """Return the routes of a device by its name."""
    path = path_of(device)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        attention = content.get("attention") or {}
        names = {kind: attention.get(kind) for kind in ("plain", "documents")}
        names |= {kind: content.get(kind) for kind in KINDS}
    except FileNotFoundError:
        return DeviceRoutes(device)
    except (OSError, ValueError, AttributeError) as error:
        return DeviceRoutes(device, problem=f"{path} cannot be read: {error}")
    given = ((kind, name) for kind, name in names.items() if name is not None)
    unknown = [f"{kind} = {name}" for kind, name in given if name not in known(kind)]
    if unknown:
        return DeviceRoutes(device, problem=f"{path} has {', '.join(unknown)}: no such route")
    return DeviceRoutes(device, **names)


def known(kind: str) -> list[str]:
    """Return the route names that a file may use for plain, documents, or one of KINDS."""
    from megalite_kernels import attention_routes, fp8_matmul, router_logits, state_library, weight_grad

    if kind == "weight_grad":
        return list(weight_grad.ROUTES)
    if kind == "router":
        return list(router_logits.ROUTES)
    if kind.startswith("fp8_"):
        return list(fp8_matmul.ROUTES)
    if kind in state_library.ROUTES:
        return list(state_library.ROUTES[kind])
    documents = kind == "documents"
    return [route.name for route in attention_routes.ROUTES if route.for_documents in (None, documents)]


def measured(device: torch.device) -> DeviceRoutes:
    """Return the routes of a GPU in this process.

    They come from its file if `train.kernels` is auto; otherwise they are the default ones.
    """
    return _of_device(device) if backend.selected == "auto" and device.type == "cuda" else DeviceRoutes()


@functools.cache
def _of_device(device: torch.device) -> DeviceRoutes:
    return read(torch.cuda.get_device_name(device))
