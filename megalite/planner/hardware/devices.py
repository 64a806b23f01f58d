"""Devices and their links, read from hardware.yaml or from a user's file. Units are bytes, seconds and FLOP/s
throughout."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.files import read_tree
from megalite.config.rule import describe_legal, suggestion
from megalite.planner.hardware.constants import CONSTANTS, Constants

TABLE = Path(__file__).with_name("hardware.yaml")
PEAKS = Path(__file__).with_name("peaks.yaml")
HOST_MEMORY_GBS = 40.0  # host memory bandwidth per device: eight devices share twelve channels of DDR5-4800
HOST_MEMORY_GIB = 200.0  # host memory per device
DISK_GBS = 1.5  # NVMe bandwidth per device

MAY_BE_ZERO = ("latency_us", "kernel_us", "host_us", "price_per_hour")


class HardwareError(ValueError):
    """Raised for an unknown device, or for a file that does not describe one."""


@dataclass(frozen=True)
class Link:
    """A link between devices.

    Attributes:
        bandwidth: bytes/s in one direction that large messages reach.
        latency: seconds per hop.
    """

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """A device, its host and its links.

    Attributes:
        peaks: precision → dense peak, FLOP/s.
        sustained: fraction of the peak that large matmuls reach.
        multiprocessors: number of units that a matmul's tiles are assigned to.
        memory: bytes.
        bandwidth: bytes/s of the memory, from the data sheet or measured.
        within, between: links inside a node and between nodes.
        per_node: devices per node.
        host: the link to the host.
        host_memory, host_size, disk: bytes/s of the host's memory, its bytes, and bytes/s of the disk, each
            per device.
        price: US dollars per hour, None if unknown.
        fp8: format that its tensor cores multiply (e4m3, or mxfp8 with scales) → dense peak, FLOP/s.
        rates: measured matmuls, (cube root of m·n·k, FLOP/s) in ascending order; if present, they replace the
            model of tiles.
        attention: if measured, FLOP/s of its forward and of its backward.
        loss: if measured, bytes/s of the loss and its gradient, which read the logits once and overwrite them
            with their gradient.
        kernel: seconds of overhead per kernel.
        host_time: seconds of the host per operation.
        tensor, messages: if measured, separate links inside a node for tensor parallelism and for messages
            between stages.
        constants: of the time model.
        cpu: whether it is a CPU, whose cores do not overlap communication and computation, and for which
            there are no custom kernels.
        measured: whether the bandwidth was reached by kernels, not taken from a data sheet.
        compared: whether published runs on it have been compared with predictions, so that their error is
            known.
    """

    name: str
    peaks: Mapping[str, float]
    sustained: float
    multiprocessors: int
    memory: float
    bandwidth: float
    within: Link
    between: Link
    per_node: int
    host: Link
    host_memory: float = HOST_MEMORY_GBS * 1e9
    host_size: float = HOST_MEMORY_GIB * 2**30
    disk: float = DISK_GBS * 1e9
    price: float | None = None
    fp8: Mapping[str, float] = field(default_factory=dict)
    rates: tuple[tuple[float, float], ...] = ()
    attention: tuple[float, float] | None = None
    loss: float | None = None
    kernel: float = 2e-6
    host_time: float = 8e-6
    tensor: Link | None = None
    messages: Link | None = None
    constants: Constants = CONSTANTS
    cpu: bool = False
    measured: bool = False
    compared: bool = False

    @property
    def own_precision(self) -> str:
        """Return the default training precision: fp32 on a CPU, else bf16 if the device has it, else fp16."""
        return "fp32" if self.cpu else next((each for each in ("bf16", "fp16") if each in self.peaks), "fp32")

    def peak(self, precision: str) -> float:
        """Return the dense peak in FLOP/s. Raises HardwareError if the device has none at this precision."""
        if precision not in self.peaks:
            raise HardwareError(
                f"--precision {precision} has no peak on {self.name}. "
                f"{describe_legal(precision, list(self.peaks))}"
            )
        return self.peaks[precision]


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = read_tree(str(TABLE), "the hardware table")
    return table


@functools.cache
def _peaks_by_name() -> dict[str, float]:
    peaks: dict[str, float] = read_tree(str(PEAKS), "the table of peaks")
    return peaks


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the device's dense peak in FLOP/s; None for CPUs and for precisions other than bf16 and fp16."""
    if precision not in ("bf16", "fp16"):
        return None
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    peaks = _peaks_by_name().items()
    return next((tera * 1e12 for name, tera in peaks if words.issuperset(name.split())), None)


def known_devices() -> list[str]:
    """Return the device names that --gpu accepts."""
    return list(_table()["devices"])


def find_device(name: str) -> Device:
    """Return the device with a name in the table or described by a YAML file. Raises HardwareError."""
    if name.lower() in _table()["devices"]:
        return read_device(name.lower(), _table()["devices"][name.lower()])
    if not name.endswith((".yaml", ".yml")):
        legal = (
            f"Legal values: {', '.join(known_devices())}, or FILE.yaml.{suggestion(name, known_devices())}"
        )
        raise HardwareError(f"--gpu {name} is not in the hardware table. {legal}")
    try:
        tree = read_tree(name, "--gpu")
    except ConfigError as error:
        raise HardwareError(str(error)) from None
    if not isinstance(tree, dict):
        raise HardwareError(
            f"--gpu {name} must contain `key: value` pairs that describe a device. {TABLE.name} has examples."
        )
    return read_device(Path(name).stem, tree)


def find_device_by_driver_name(driver_name: str) -> Device | None:
    """Return the device in the table with this driver name; None if there is none."""
    named = (name for name, row in _table()["devices"].items() if row.get("device") == driver_name)
    return next((find_device(name) for name in named), None)


def read_device(name: str, row: Mapping[str, Any]) -> Device:
    """Read a device from its row of the table or file. Raises HardwareError."""
    if wrong := next(
        (key for key, value in _numbers(row) if value < 0 or (value == 0 and key not in MAY_BE_ZERO)), None
    ):
        raise HardwareError(f"--gpu {name}: {wrong} must be positive. {TABLE.name} documents all keys.")
    try:
        return _read(name, dict(row))
    except KeyError as error:
        raise HardwareError(
            f"--gpu {name}: missing key {error.args[0]}. {TABLE.name} documents all keys."
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise HardwareError(
            f"--gpu {name}: value of the wrong type: {error}. {TABLE.name} documents all keys."
        ) from None


def _read(name: str, row: dict[str, Any]) -> Device:
    optional: dict[str, Any] = {}
    for key, attribute, scale in (
        ("host_memory_gbs", "host_memory", 1e9),
        ("host_memory_gib", "host_size", 2.0**30),
        ("disk_gbs", "disk", 1e9),
        ("price_per_hour", "price", 1.0),
        ("loss_gbs", "loss", 1e9),
        ("kernel_us", "kernel", 1e-6),
        ("host_us", "host_time", 1e-6),
    ):
        if key in row:
            optional[attribute] = float(row.pop(key)) * scale
    for key in ("cpu", "measured", "compared"):
        if key in row:
            optional[key] = bool(row.pop(key))
    if "products" in row:
        optional["rates"] = tuple(
            sorted((float(size), 1e9 * float(gflops)) for size, gflops in row.pop("products").items())
        )
    if "attention_gflops" in row:
        forward, backward = row.pop("attention_gflops")
        optional["attention"] = (1e9 * float(forward), 1e9 * float(backward))
    for key in ("tensor", "messages"):
        if key in row:
            optional[key] = read_link(row.pop(key))
    within, between = (read_link(row.pop(key), in_runs=True) for key in ("within", "between"))
    host = read_link(row.pop("host"))
    device = Device(
        name=name,
        peaks=_peaks(row),
        fp8={form: 1e12 * float(tera) for form, tera in row.pop("fp8_tflops", {}).items()},
        sustained=float(row.pop("sustained")),
        multiprocessors=int(row.pop("multiprocessors")),
        memory=float(row.pop("memory_gib")) * 2**30,
        bandwidth=float(row.pop("memory_gbs")) * 1e9,
        within=within,
        between=between,
        per_node=int(row.pop("gpus_per_node")),
        host=host,
        **optional,
    )
    if row:
        raise HardwareError(
            f"--gpu {name}: unknown key {next(iter(row))!r}. {TABLE.name} documents all keys."
        )
    return device


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the (key, number) pairs of a row and of its nested mappings."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        else:
            values = value if isinstance(value, list) else [value]
            yield from (
                (key, number)
                for number in values
                if isinstance(number, int | float) and not isinstance(number, bool)
            )


def _peaks(row: dict[str, Any]) -> dict[str, float]:
    """Return FLOP/s by precision: the 16-bit peaks of the device's name, unless the row has its own."""
    device, bf16, given = row.pop("device", ""), bool(row.pop("bf16", True)), row.pop("tflops", {})
    peaks = {}
    for precision in ("bf16", "fp16") if bf16 else ("fp16",):
        if (peak := peak_flops(device, precision)) is not None:
            peaks[precision] = peak
    if "fp32_tflops" in row:
        peaks["fp32"] = float(row.pop("fp32_tflops")) * 1e12
    peaks |= {precision: float(tera) * 1e12 for precision, tera in given.items()}
    if not peaks:
        raise HardwareError(
            f"device {device!r} is not in peaks.yaml. Add its dense peak: tflops: {{bf16: N}}."
        )
    return peaks


def read_link(value: str | Mapping[str, Any], in_runs: bool = False) -> Link:
    """Read a link from its name in the table or from its values.

    Args:
        in_runs: use the bandwidth that collectives reach in a run. It applies to links of the table; others
            are measured.
    """
    links = _table()["links"]
    if isinstance(value, str) and value not in links:
        legal = f"Legal values: {', '.join(links)}, or {{gbs: N, latency_us: N}}."
        raise HardwareError(f"Unknown link {value!r}. {legal}{suggestion(value, links)}")
    row = links[value] if isinstance(value, str) else value
    reached = CONSTANTS.links if in_runs and isinstance(value, str) else 1.0
    bandwidth = float(row["gbs"]) * float(row.get("efficiency", 1.0)) * reached * 1e9
    return Link(value if isinstance(value, str) else "measured", bandwidth, float(row["latency_us"]) * 1e-6)
