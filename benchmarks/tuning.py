"""Offline tuner of the kernels' static tables: `tools/benchmark.py kernels --tune`.

A module looks up its launch settings with `_variant`, which is replaced here to return the table's variant
with other settings. Every setting is compiled and timed on this device, and the best one is printed next to
that of the table. The tables are edited by hand; the compile tests then check registers and shared memory on
every architecture.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from megalite_kernels.launch import ARCHITECTURES, Variant

from benchmarks.kernel_cases import Function, KernelCase


@dataclass(frozen=True)
class Setting:
    """Replacements of a variant's settings. None keeps the value of the variant."""

    constants: dict[str, Any] = field(default_factory=dict)
    warps: int | None = None
    stages: int | None = None
    # entries of the module's tables, the same for every architecture
    tables: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        named = {**self.constants, **self.tables, "warps": self.warps, "stages": self.stages}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None) or "table"

    def of(self, variant: Variant) -> Variant:
        return replace(
            variant,
            constants={**variant.constants, **self.constants},
            warps=self.warps or variant.warps,
            stages=self.stages or variant.stages,
        )


def _elementwise(columns: Iterable[int], tile: Iterable[int], warps: Iterable[int]) -> list[Setting]:
    """Return settings for tiles of `tile` elements, `columns` wide."""
    return [
        Setting({"ROWS": max(size // wide, 1), "COLUMNS": wide}, w)
        for size in tile
        for wide in columns
        for w in warps
    ]


def _attention(tiles: Iterable[tuple[int, int, int]], stages: Iterable[int]) -> list[Setting]:
    """Return settings for tiles of (queries, keys), with their number of warps."""
    return [Setting({"QUERIES": queries, "KEYS": keys}, w, s) for queries, keys, w in tiles for s in stages]


SETTINGS: dict[tuple[str, str], list[Setting]] = {
    ("activation_triton", "_forward"): _elementwise((256, 512, 1024), (1024, 2048, 4096), (4, 8)),
    ("activation_triton", "_backward"): _elementwise((256, 512, 1024), (1024, 2048, 4096), (4, 8)),
    ("adamw_triton", "_adamw"): [Setting({"TILE": tile}, w) for tile in (1024, 2048, 4096) for w in (4, 8)],
    ("cross_entropy_triton", "_statistics"): [
        Setting({"DEPTH": depth, "COLUMNS": columns}, w)
        for depth in (2, 4, 8)
        for columns, w in ((512, 2), (1024, 4), (2048, 8))
    ],
    ("cross_entropy_triton", "_gradient"): [
        Setting({"COLUMNS": columns}, w) for columns in (2048, 4096, 8192) for w in (4, 8)
    ],
    ("dropout_triton", "_dropout"): _elementwise((256, 512, 1024), (1024, 2048, 4096), (4, 8)),
    ("grad_norm_triton", "_squared_sums"): [
        Setting({"TILE": tile}, w) for tile in (4096, 8192, 16384) for w in (4, 8)
    ],
    ("norm_triton", "_forward"): [Setting({}, w) for w in (2, 4, 8, 16)],
    ("norm_triton", "_backward"): [
        Setting({"STAGES": stages}, w, tables={"WARPS": resident})
        for stages in (1, 2, 3)
        for w, resident in ((4, 16), (8, 16), (8, 32), (16, 16), (16, 32))
    ],
    ("ordered_sum_triton", "_add"): [
        Setting({"TILE": tile}, w) for tile in (1024, 2048, 4096) for w in (4, 8)
    ],
    ("rotary_triton", "_rotary"): [Setting({"ROWS": rows}, w) for rows in (16, 32, 64) for w in (2, 4, 8)],
    ("attention_triton", "_forward"): _attention(
        ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8)), (2, 3, 4)
    ),
    ("attention_triton", "_backward_queries"): _attention(
        ((64, 64, 4), (64, 64, 8), (128, 64, 8), (64, 128, 8), (128, 32, 8)), (2, 3)
    ),
    ("attention_triton", "_backward_keys"): _attention(
        ((64, 64, 4), (64, 64, 8), (64, 128, 8), (32, 128, 8), (32, 64, 4)), (2, 3)
    ),
}
SETTINGS |= {
    ("permutation_triton", kernel): [
        Setting({"COLUMNS": columns}, w) for columns in (1024, 2048, 4096) for w in (2, 4, 8)
    ]
    for kernel in ("_gather", "_combine", "_combine_backward")
}
SETTINGS[("grouped_weight_grad_triton", "_matmul")] = [
    Setting({"OUT": out, "IN": column, "ROWS": rows}, w, s)
    for out, column, w in ((64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
    for rows in (32, 64)
    for s in (2, 3, 4)
]
SETTINGS |= {
    ("attention_part_triton", kernel): settings
    for (name, kernel), settings in SETTINGS.items()
    if name == "attention_triton"
}
SETTINGS |= {
    (name, kernel): [Setting({}, w, s) for w in (2, 4, 8) for s in (1, 2, 3)]
    for name, kernels in {
        "causal_conv_triton": ("_forward", "_backward"),
        "gated_norm_triton": ("_forward", "_backward"),
        "recurrence_triton": (
            *("_prepare", "_scan", "_outputs", "_within", "_adjoint", "_pairs", "_gradients"),
        ),
    }.items()
    for kernel in kernels
}
SETTINGS |= {
    ("sparse_attention_triton", kernel): [
        Setting({"HEADS": heads, "SLOTS": slots}, w, s)
        for heads, slots in ((16, 64), (32, 64), (64, 64), (16, 128), (32, 32))
        for w in (4, 8)
        for s in (1, 2)
    ]
    for kernel in ("_forward", "_backward", "_probabilities")
}
SETTINGS |= {
    ("index_scores_triton", kernel): [
        Setting({"KEYS": keys}, w, s) for keys in (32, 64, 128) for w in (4, 8) for s in (1, 2)
    ]
    for kernel in ("_packed", "_selected_scores", "_gradients")
}
SETTINGS[("selected_rows_triton", "_products")] = [
    Setting({"SLOTS": slots, "CHANNELS": channels}, w, s)
    for slots, channels in ((64, 64), (64, 128), (128, 64), (128, 128))
    for w in (4, 8)
    for s in (1, 2)
]
SETTINGS[("selected_rows_triton", "_sum")] = [
    Setting({"QUERIES": queries, "CHANNELS": channels}, w)
    for queries in (8, 16, 32)
    for channels in (64, 128, 256)
    for w in (2, 4)
]
for _kernel in ("_matmul", "_transposed_matmul"):
    SETTINGS[("block_matmul_triton", _kernel)] = [
        Setting({"TILE": rows}, w, s) for rows, w in ((64, 4), (128, 4), (128, 8)) for s in (2, 3, 4)
    ]
SETTINGS[("fp8_matmul_triton", "_matmul")] = [
    Setting({"TILE_ROWS": rows}, w, s)
    for rows, w in ((64, 4), (128, 4), (128, 8), (256, 8))
    for s in (2, 3, 4)
]
SETTINGS[("fp8_matmul_triton", "_matmul")] += [
    Setting(tables={"READS_TRANSPOSED": reads}) for reads in (False, True)
]
SETTINGS[("fp8_mx_matmul_triton", "_mx_matmul")] = [
    Setting({"TILE_ROWS": rows, "COLUMNS": columns, "INNER": inner}, 8, s)
    for rows, columns in ((128, 128), (128, 256), (256, 128))
    for inner in (128, 256)
    for s in (2, 3, 4)
]
SETTINGS[("fp8_triton", "_quantize")] = [Setting({}, w) for w in (2, 4, 8)]
SETTINGS[("fp8_triton", "_quantize_tokens")] = [
    Setting({"COLUMNS": columns}, w) for columns in (32, 64, 128) for w in (2, 4, 8)
]
SETTINGS[("fp8_weight_grad_triton", "_matmul")] = [
    Setting({"OUT": out, "IN": column}, w, s)
    for out, column, w in ((64, 128, 4), (128, 64, 4), (128, 128, 8))
    for s in (2, 3, 4)
]
SETTINGS[("fp8_triton", "_quantize_mx")] = [
    Setting({"TILE": tile}, w) for tile in (32, 64, 128) for w in (2, 4)
]
"""(module, kernel) → settings to try."""


def tune(
    cases: Iterable[KernelCase], measure: Callable[[Function], float], smoke: bool, until: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for every tuned kernel of every case."""
    for case in cases:
        for kernel in case.tuned:
            settings = SETTINGS[case.module, kernel][: 1 if smoke else None]
            row: dict[str, Any] = {
                "kernel": case.kernel,
                "shape": case.shape,
                "tuned": kernel,
                "us": None,
                "best_us": None,
                "best": None,
            }
            tried: dict[str, float] = {}
            failed: dict[str, str] = {}
            try:
                ours = case.make().ours
                for setting in (Setting(), *settings):
                    if time.monotonic() > until:
                        failed["the rest"] = "out of time"
                        break
                    try:
                        with applied(case.module, kernel, setting):
                            tried[str(setting)] = 1e6 * measure(ours)
                    except Exception as error:  # more shared memory than there is, for example
                        failed[str(setting)] = f"{type(error).__name__}: {error}"[:200]
                del ours
            except Exception as error:
                failed["the case"] = f"{type(error).__name__}: {error}"[:200]
            if tried:
                best = min(tried, key=lambda name: tried[name])
                row |= {"us": tried.get("table"), "best_us": tried[best], "best": best}
            yield {**row, "tried": tried, "failed": failed}


def applied(module_name: str, kernel: str, setting: Setting) -> ExitStack:
    """Context manager in which a module launches a kernel with these settings."""
    module = importlib.import_module(f"megalite_kernels.{module_name}")
    lookup, variants = module._variant, {}

    def variant(*key: Any) -> Variant:
        known: Variant = lookup(*key)
        if known.kernel.fn.__name__ != kernel:
            return known
        if key not in variants:
            variants[key] = setting.of(known)
        return variants[key]

    stack = ExitStack()
    stack.enter_context(patch.object(module, "_variant", variant))
    for table, value in setting.tables.items():
        stack.enter_context(patch.dict(getattr(module, table), dict.fromkeys(ARCHITECTURES, value)))
    return stack
