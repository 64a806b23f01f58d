"""Communication between ranks."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from megalite.config.option import NOT_NEGATIVE, option
from megalite.config.rule import Rule


@dataclass
class NetworkConfig:
    """Communication between ranks. An option sets an environment variable before the process group starts; a
    variable that is already set is kept. null leaves the variable unset."""

    interface: str | None = None
    """Network interface of NCCL and gloo, for example eth0."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """NCCL's log level."""
    ib_devices: str | None = None
    """InfiniBand devices that NCCL uses, for example mlx5_0,mlx5_1."""
    ib_gid_index: int | None = option(None, NOT_NEGATIVE)
    """Index of the global identifier that NCCL uses under RoCE, often 3."""
    ib_timeout: int | None = None
    """Exponent of the InfiniBand acknowledgement timeout, 4.096 µs * 2 ** ib_timeout. NCCL's default is 20;
    large networks use 22 or 23."""
    ib_retries: int | None = option(None, NOT_NEGATIVE)
    """Number of InfiniBand retries after a timeout. NCCL's default is 7."""
    variables: dict[str, Any] | None = None
    """Other environment variables, for example {NCCL_NVLS_ENABLE: 0}."""
    test: bool = False
    """Measure the links between ranks for 3 seconds at start, and report the slowest."""


_VARIABLE = re.compile(r"[A-Za-z_]\w*")

RULES: tuple[Rule, ...] = (
    Rule(
        "InfiniBand's timeout",
        "network.ib_timeout",
        lambda c: c.network.ib_timeout not in (None, *range(1, 32)),
        message="is not a valid exponent, from 1 to 31",
        legal=range(1, 32),
    ),
    Rule(
        "variables have names",
        "network.variables",
        lambda c: not all(map(_VARIABLE.fullmatch, c.network.variables or {})),
        message="has a key that is not a valid variable name",
        legal="Write {NAME: value}, for example {NCCL_NVLS_ENABLE: 0}.",
    ),
)
