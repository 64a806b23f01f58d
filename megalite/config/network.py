"""The options of communication between ranks. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class NetworkConfig:
    """Communication between ranks. An option sets an environment variable before the process group starts; a variable that is already set
    is kept. null leaves the variable unset."""

    interface: str | None = None
    """Network interface of NCCL and gloo, for example eth0."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """NCCL's log level."""
    ib_devices: str | None = None
    """InfiniBand devices that NCCL uses, for example mlx5_0,mlx5_1."""
    ib_gid_index: int | None = None
    """Index of the global identifier that NCCL uses under RoCE, often 3."""
    ib_timeout: int | None = None
    """Exponent of the InfiniBand acknowledgement timeout, 4.096 µs * 2 ** ib_timeout. NCCL's default is 20; large networks use 22 or 23."""
    ib_retries: int | None = None
    """Number of InfiniBand retries after a timeout. NCCL's default is 7."""
    variables: dict[str, Any] | None = None
    """Other environment variables, for example {NCCL_NVLS_ENABLE: 0}."""
    test: bool = False
    """Measure the links between ranks for 3 seconds at start, and report the slowest."""
