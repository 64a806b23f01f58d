"""A base in 4 bits and the adapters that make up for what its quantization loses, found together (LoftQ, Li
et al. 2023), as a directory of transformers and one of PEFT.

    Q ← quantized(W − B A · scale)        B A · scale ← the best approximation of W − Q        from B A = 0 on

After the first iteration the base is no longer the quantized W. It has files of its own, so that every run
and program reads the same codes. `huggingface.loftq` is the start of a run with one iteration.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint.directories import check_free
from megalite.config.sections.lora import PROJECTIONS
from megalite.families.weight_files import ADAPTER, ADAPTER_SETTINGS, INDEX
from megalite.huggingface.export_files import new_directory
from megalite.huggingface.files import ConversionError, SafetensorsFile
from megalite.huggingface.loftq import decomposed
from megalite.huggingface.nf4_export import in_4_bits, settings_of
from megalite.huggingface.original import head_in
from megalite.huggingface.peft_modules import AdaptedModule, modules_of
from megalite.huggingface.quantized_files import WEIGHT, matrices_of, rewrite
from megalite.huggingface.source import HuggingFaceSource
from megalite.model.adapter_parameters import A, B
from megalite.system.files import write_synced
from megalite.system.progress import Report, silent

BASE_DIRECTORY, ADAPTER_DIRECTORY = "base", "adapter"


@torch.no_grad()
def write_loftq(
    source: Path, target: Path, rank: int, alpha: float, iterations: int, progress: Report = silent
) -> dict[str, Any]:
    """Write `target`/base and `target`/adapter, and return a summary for display.

    All matrices of layers that bitsandbytes quantizes have an adapter.

    Args:
        source: Hugging Face directory with weights in full precision.

    Raises:
        ConfigError, ConversionError: it cannot be read, or PEFT cannot apply the adapters. `target` gets its
            name only when it is complete.
    """
    check_free(target)
    opened = HuggingFaceSource.of(source)
    files = _files(opened)
    chosen = matrices_of(opened.model, opened.places, PROJECTIONS, lambda shape: True)
    ours = [name for name, place in opened.places.items() if place.theirs in chosen]
    modules = {f"{each.name}{WEIGHT}": each for each in modules_of(opened.places, ours)}
    _check(opened, modules.values())
    adapter, squares = dict[str, Tensor](), torch.zeros(3).double()

    def quantized(name: str, matrix: Tensor) -> dict[str, Tensor]:
        progress("decomposing matrices", len(adapter) // 2, len(chosen))
        exact, product = matrix.float(), torch.zeros(())
        for _ in range(iterations):
            tensors, values = in_4_bits(name, exact - product, matrix.dtype)
            factors = decomposed(name, exact - values, rank, alpha / rank)
            product = factors[B] @ factors[A] * (alpha / rank)
        for key, half in zip(modules[name].keys(dora=False), (A, B), strict=True):
            adapter[key] = factors[half].contiguous()
        rests = exact, exact - values, exact - values - product
        squares.add_(torch.stack([each.square().sum() for each in rests]).double())
        return tensors

    with new_directory(target) as temporary:
        base, beside = temporary / BASE_DIRECTORY, temporary / ADAPTER_DIRECTORY
        for each in (base, beside):
            each.mkdir()
        for file in files:
            shutil.copy(file, base)
        rewrite(base, chosen, quantized)
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = settings_of(
            opened.places, chosen, head_in(opened.model, opened.family)
        )
        write_synced(base / "config.json", json.dumps(config, indent=2) + "\n")
        save_file(adapter, beside / ADAPTER[0], {"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str((target / BASE_DIRECTORY).absolute()),
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(each.name for each in modules.values()),
            "bias": "none",
            "inference_mode": True,
        }
        write_synced(beside / ADAPTER_SETTINGS, json.dumps(settings, indent=2) + "\n")
    whole, lost, left = squares.tolist()
    return {
        "base": str(target / BASE_DIRECTORY),
        "adapter": str(target / ADAPTER_DIRECTORY),
        "matrices": len(chosen),
        "lost": math.sqrt(lost / whole),
        "left": math.sqrt(left / whole),
    }


def _files(opened: HuggingFaceSource) -> list[Path]:
    """Return the files of a directory that the base has, too: those that are read, and no other weights.

    Raises ConversionError if they are quantized, or are no safetensors.
    """
    directory, weights = opened.directory, opened.weights._files.values()
    read = {each.path for each in weights if isinstance(each, SafetensorsFile)}
    if "quantization_config" in json.loads((directory / "config.json").read_text(encoding="utf-8")):
        raise ConversionError(
            f"{directory} is quantized: what this has lost is not in it. Name the model in full precision."
        )
    if not read:
        raise ConversionError(
            f"{directory} has no safetensors. Load the model with transformers, and save it again."
        )
    others = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    return sorted(
        each
        for each in directory.iterdir()
        if each.is_file() and (each in read or not each.name.removesuffix(INDEX).endswith(others))
    )


def _check(opened: HuggingFaceSource, modules: Collection[AdaptedModule]) -> None:
    """Raise ConversionError if there is nothing to adapt, or PEFT cannot adapt it."""
    if not modules:
        raise ConversionError(f"{opened.directory} has no matrices that bitsandbytes quantizes.")
    if taken := next((each.name for each in modules if each.as_weight(opened.family)), None):
        raise ConversionError(
            f"PEFT takes {taken} of a {opened.family} model for an expert, and does not adapt it in 4 bits. "
            "Set lora.start to loftq in a run instead, which has one iteration."
        )
