"""The fastest routes of a device, as measured there: routes/<device>.json, which `megalite first-light`
writes.

    {"attention": {"plain": "cudnn", "documents": "flash_varlen"}, "weight_grad": "addmm", "router":
    "out_dtype", "measured": {…}}

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


@dataclass(frozen=True)
class DeviceRoutes:
    """What was measured on a device. An absent name means the default order.

    Attributes: `device`, its name; `plain` and `documents`, of attention; `weight_grad`; `router`; `problem`,
    why the file does not count.
    """

    device: str = ""
    plain: str | None = None
    documents: str | None = None
    weight_grad: str | None = None
    router: str | None = None
    problem: str | None = None


def path_of(device: str) -> Path:
    """The file of a device, by the name that torch gives it."""
    return DIRECTORY / (re.sub("[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def read(device: str) -> DeviceRoutes:
    """The routes of a device by its name."""
    path = path_of(device)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        attention = found.get("attention") or {}
        names = {kind: attention.get(kind) for kind in ("plain", "documents")}
        names |= {kind: found.get(kind) for kind in ("weight_grad", "router")}
    except FileNotFoundError:
        return DeviceRoutes(device)
    except (OSError, ValueError, AttributeError) as error:
        return DeviceRoutes(device, problem=f"{path} cannot be read: {error}")
    unknown = [
        f"{what} = {name}" for what, name in names.items() if name is not None and name not in known(what)
    ]
    return (
        DeviceRoutes(device, problem=f"{path} has {', '.join(unknown)}: no such route")
        if unknown
        else DeviceRoutes(device, **names)
    )


def known(what: str) -> list[str]:
    """The names that a file may give for plain, documents, weight_grad or router."""
    from megalite_kernels import attention_routes, router_logits, weight_grad

    products = {"weight_grad": [*weight_grad.ROUTES], "router": [*router_logits.ROUTES]}
    if what in products:
        return products[what]
    return [
        route.name for route in attention_routes.ROUTES if route.for_documents in (None, what == "documents")
    ]


def measured(device: torch.device) -> DeviceRoutes:
    """The routes of a GPU that count in this process: those of its file if `train.kernels` is auto, else
    none."""
    return _of_device(device) if backend.selected == "auto" and device.type == "cuda" else DeviceRoutes()


@functools.cache
def _of_device(device: torch.device) -> DeviceRoutes:
    return read(torch.cuda.get_device_name(device))
