"""Part 1: versions and missing packages, GPUs, their links and clocks, and known issues."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from megalite.launch import machine
from megalite.launch.checkup import host
from megalite.launch.checkup.software import is_older

KNOWN = Path(__file__).with_name("known.yaml")
WANTED = {  # module → distribution, and what lacks without it
    "jsonargparse": ("jsonargparse", "runs started from a command line"),
    "google_crc32c": ("google-crc32c", "checkpoints"),
    "yaml": ("pyyaml", "presets, peaks, tile tables"),
    "pytest": ("pytest", "the tests marked gpu"),
    "hypothesis": ("hypothesis", "the tests marked gpu"),
    "rich": ("rich", "tables in colour"),
    "transformers": ("transformers", "the comparison with transformers"),
}
OPTIONAL = ("liger-kernel", "flash-attn", "flash-attn-3", "nvidia-ml-py")
CLOCKS = (
    "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu,"
    "pcie.link.gen.current,pcie.link.width.current"
)
QUERY_S = 20.0


def rows(scene: Scene) -> Iterator[Row]:
    import torch

    versions_found = versions(torch)
    yield row(
        "versions",
        "measured",
        ", ".join(f"{name} {value}" for name, value in versions_found.items() if value),
        versions=versions_found,
    )
    yield packages()
    for finding in (*host.compiler(), *host.shared_memory(), *host.cores()):
        yield row(
            finding.name,
            "measured" if finding.verdict == "good" else "note",
            f"{finding.value}. {finding.advice}".rstrip(". "),
        )
    if not scene.gpus:
        yield absent("GPUs, their links and clocks", "no GPU found")
    else:
        yield from (gpu(torch, index) for index in range(len(scene.gpus)))
        yield guarded("links", "measurement", lambda: topology(torch, len(scene.gpus)))
        yield guarded("clocks", "measurement", clocks)
    capabilities = [
        ".".join(map(str, torch.cuda.get_device_capability(index))) for index in range(len(scene.gpus))
    ]
    for trouble in troubles(versions_found, capabilities, len(scene.gpus)):
        yield row("known trouble", "note", f"{trouble['what']} ({trouble['source']})")


def versions(torch: Any) -> dict[str, str | None]:
    """Return the versions of all packages that figures and issues depend on."""
    gpu = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if gpu else None
    return {
        **report.versions(),
        **{name: report.version(name) for name in ("triton", *OPTIONAL)},
        "cuda": torch.version.cuda,
        "driver": machine.driver_version(),
        "cudnn": cudnn_version(cudnn) if cudnn else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    }


def cudnn_version(number: int) -> str:
    """Return cuDNN's version as text: 91501 is 9.15.1."""
    major, rest = divmod(number, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def packages() -> Row:
    missing = {name: purpose for module, (name, purpose) in WANTED.items() if find_spec(module) is None}
    if not missing:
        return row("packages", "measured", "all packages that first-light uses are installed")
    lacks = "; ".join(f"without {name}: {purpose}" for name, purpose in missing.items())
    return row(
        "packages", "note", f"pip install {' '.join(missing)} ({lacks} not possible)", missing=list(missing)
    )


def gpu(torch: Any, index: int) -> Row:
    properties = torch.cuda.get_device_properties(index)
    facts = {
        "memory_gib": properties.total_memory / 2**30,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
    }
    detail = (
        "{memory_gib:.0f} GiB, {multiprocessors} multiprocessors, capability {capability}, L2 {l2_mib:.0f} "
        "MiB"
    ).format(**facts)
    return row(f"GPU {index}", "measured", f"{properties.name}: {detail}", model=properties.name, **facts)


def topology(torch: Any, count: int) -> Row:
    """Report the links of the GPUs to each other and to the processors."""
    direct = {
        f"{a}-{b}": torch.cuda.can_device_access_peer(a, b)
        for a in range(count)
        for b in range(count)
        if a < b
    }
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    matrix = query(["topo", "-m"])
    links = sorted(set(re.findall(r"\b(NV\d+|SYS|NODE|PHB|PXB|PIX)\b", matrix.split("Legend")[0])))
    detail = (
        f"{', '.join(links) or 'one GPU'}; {sum(direct.values())} of {len(direct)} pairs support "
        f"peer-to-peer access; {nodes} NUMA nodes"
    )
    return row("links", "measured", detail, matrix=matrix, peer_access=direct, numa_nodes=nodes)


def clocks() -> Row:
    lines = query([f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits"]).splitlines()
    names = CLOCKS.split(",")
    values = [dict(zip(names, (value.strip() for value in line.split(",")), strict=True)) for line in lines]
    first = values[0]
    detail = (
        f"{first['clocks.sm']} of {first['clocks.max.sm']} MHz, {first['power.draw']} of "
        f"{first['power.limit']} W, "
        f"{first['temperature.gpu']} °C, PCIe {first['pcie.link.gen.current']} × "
        f"{first['pcie.link.width.current']}, before any load"
    )
    return row("clocks", "measured", detail, gpus=values)


def query(arguments: list[str]) -> str:
    """Return the output of nvidia-smi. Raises OSError or subprocess.SubprocessError."""
    return subprocess.run(
        ["nvidia-smi", *arguments],
        capture_output=True,
        text=True,
        timeout=QUERY_S,
        check=True,
        encoding="utf-8",
        errors="replace",
    ).stdout


def troubles(packages: dict[str, str | None], capabilities: list[str], gpus: int) -> list[dict[str, Any]]:
    """Return the rows of known.yaml with all conditions met."""
    import yaml

    def holds(trouble: dict[str, Any]) -> bool:
        old = all(
            (has := packages.get(name)) is not None and is_older(has, bound)
            for name, bound in trouble.get("below", {}).items()
        )
        new = all(
            (has := packages.get(name)) is not None and not is_older(has, bound)
            for name, bound in trouble.get("from", {}).items()
        )
        here = not trouble.get("capability") or bool(set(trouble["capability"]) & set(capabilities))
        return old and new and here and trouble.get("gpus", gpus) == gpus

    return [trouble for trouble in yaml.safe_load(KNOWN.read_text(encoding="utf-8")) if holds(trouble)]
