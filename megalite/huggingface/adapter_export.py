"""Export of the LoRA adapters of a checkpoint to PEFT's format.

The location of each tensor is determined by `peft_modules`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import Manifest, directories
from megalite.checkpoint.checksummed_chunks import dtype_name
from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.families.hub import repository
from megalite.families.model_config import loader_of
from megalite.families.weight_files import ADAPTER, ADAPTER_SETTINGS
from megalite.huggingface.base_weights import with_base
from megalite.huggingface.config_json import to_hf_config
from megalite.huggingface.export_files import new_directory
from megalite.huggingface.files import ConversionError, NewFile
from megalite.huggingface.merging import Adapters, saved
from megalite.huggingface.model_card import write_card
from megalite.huggingface.original import family_of, head_of, model_of, origin, places_of
from megalite.huggingface.peft_modules import (
    EMBEDDING,
    PREFIX,
    REFUSED,
    AdaptedModule,
    FusedExperts,
    module_of,
    modules_of,
    saved_keys,
)
from megalite.huggingface.source import HF
from megalite.huggingface.tensor_places import TensorPlace
from megalite.huggingface.tokenizer_export import TokenizerChoice, choose, write_tokenizer
from megalite.system.files import write_synced


def export_adapter(source: Path | Manifest, target: Path) -> dict[str, Any]:
    """Write the adapters of a checkpoint as a PEFT directory, and return a summary for display.

    Args:
        source: directory of the checkpoint, or its manifest.

    Raises ConfigError or CheckpointError; the directory gets its name only when it is complete.
    """
    directories.check_free(target)
    manifest = with_base(source if isinstance(source, Manifest) else checkpoint.manifest_of(source))
    manifest.check_files()
    directory = manifest.directory
    model, adapters = model_of(manifest), Adapters(manifest)
    lora = adapters.lora
    if not adapters.pairs:
        raise ConversionError(
            f"{directory} does not contain adapters because it was trained without lora.rank. Use `megalite "
            "convert export` instead."
        )
    if model.mup is not None:
        raise ConversionError(
            f"{directory} was trained with model.mup = {model.mup}, whose factors an adapter alone "
            "cannot carry. Use `megalite convert export`, which merges both."
        )
    places = places_of(model, directory)
    modules = modules_of(places, adapters.pairs)
    tensors = {
        key: value
        for each in modules
        for key, value in zip(each.keys(lora.dora), _tensors(each, adapters, places), strict=True)
    }
    head = head_of(model, directory)
    tensors |= dict(_saved(adapters, places, head))
    base = _base(model)
    family = family_of(model, directory)
    settings = _settings(modules, places, adapters, head, base, family)
    tokenizer = choose(manifest, TokenizerChoice(), origin(directory, model))
    parameters, dtypes = (
        sum(value.numel() for value in tensors.values()),
        {dtype_name(value.dtype) for value in tensors.values()},
    )
    with new_directory(target) as temporary:
        with closing(
            NewFile(
                temporary / ADAPTER[0],
                {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()},
            )
        ) as file:
            for name, value in tensors.items():
                file.write(name, value)
        write_synced(temporary / ADAPTER_SETTINGS, json.dumps(settings, indent=2) + "\n")
        identity = write_tokenizer(temporary, tokenizer, manifest.state["step"])
        facts = {
            "adapter": f"{'DoRA' if lora.dora else 'LoRA'} of rank {lora.rank}",
            "parameters": f"{parameters:,}",
        }
        facts |= {"dtype": ", ".join(sorted(dtypes))}
        architecture = to_hf_config(model, family)["architectures"]
        loader = loader_of({"model_type": family, "architectures": architecture})
        write_card(temporary, manifest, identity, facts, base=base or "", loader=loader)
    return {
        "rank": lora.rank,
        "parameters": parameters,
        "dtypes": sorted(dtypes),
        "modules": [each.name for each in modules],
    } | {
        "tokenizer": tokenizer.name,
        "notes": [*tokenizer.notes, *_without_dropout(lora, settings), *_on_a_larger_table(model)],
    }


def _on_a_larger_table(model: ModelConfig) -> list[str]:
    """Return a note if PEFT requires a base model with additional rows."""
    if model.resize_embeddings is None:
        return []
    return [
        f"the run added tokens: call resize_token_embeddings({model.vocabulary}) on the base model before "
        "loading the adapter with PEFT"
    ]


def _base(model: ModelConfig) -> str | None:
    """Return the base model of the adapters: org/name, or an absolute path."""
    start = model.initial_weights or ""
    directory = start.removeprefix(HF) if start.startswith(HF) else model.from_hf
    if directory is None:
        return None
    name = repository(directory)
    return str(Path(name).absolute()) if name == directory and Path(name).exists() else name


def _tensors(module: AdaptedModule, adapters: Adapters, places: dict[str, TensorPlace]) -> Iterator[Tensor]:
    """Yield PEFT's A [ranks, in], B [out, ranks] and, with `lora.dora`, magnitudes [out] of a module.

    ranks is the sum of our weights' ranks.

    Where our factors on B A differ within a module, B has them, relative to the first one's.
    """
    pairs = {name: adapters.pairs[name] for name in module.weights}
    if isinstance(module, FusedExperts):
        for pair in pairs.values():
            yield from (pair.a, module.to_peft(pair.b).contiguous())
        return
    first = next(iter(pairs.values())).scale
    a, start = torch.cat([pair.a for pair in pairs.values()]), 0
    b = a.new_zeros(module.shape[0], len(a))
    for name, pair in pairs.items():
        stop = start + len(pair.a)
        b[module.rows(name), start:stop] = pair.b if pair.scale == first else pair.b * (pair.scale / first)
        start = stop
    yield from (a, b)
    if adapters.lora.dora:
        magnitudes = torch.empty(module.shape[0])
        for name, rows in module.all_weights(places).items():
            lengths, adapted = adapters.row_lengths(name), pairs.get(name)
            magnitudes[rows] = (
                lengths if adapted is None or adapted.delta is None else lengths + adapted.delta
            ).to(magnitudes.dtype)
        yield magnitudes


def _saved(adapters: Adapters, places: dict[str, TensorPlace], head: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are trained in full."""
    for name, keys in saved_keys(adapters.model, adapters.lora, places, head).items():
        place, value = places[name], adapters.read(name)
        whole = value.new_empty(place.shape)
        place.write(whole, (0,) * value.dim(), value)
        pieces = (
            whole.chunk(len(place.tensors))
            if "{}" in place.theirs
            else [whole.view(shape) for shape in place.tensors.values()]
        )
        for key, piece in zip(keys, [*pieces, whole], strict=False):  # the last one is a tied head
            yield key, piece.contiguous()


def _settings(
    modules: Sequence[AdaptedModule],
    places: dict[str, TensorPlace],
    adapters: Adapters,
    head: str,
    base: str | None,
    family: str,
) -> dict[str, Any]:
    """Return PEFT's adapter_config.json. Raises ConversionError if PEFT cannot apply the adapters."""
    lora, model = adapters.lora, adapters.model
    others = {module_of(place) for place in places.values()} - {module.name for module in modules}
    numbers = {module.name: _numbers(module, adapters) for module in modules}
    weights = _as_weights(modules, family, lora.dora)
    _check_accepted(modules, family)

    def target(name: str, others: set[str]) -> str:
        return _target(name, others) + (".weight" if name in weights else "")

    def pattern(index: int, default: float) -> dict[str, float]:
        """Return the modules with a non-default number, by the shortest suffix that only matches equal
        numbers.
        """
        given = {name: own[index] for name, own in numbers.items()}
        return {
            target(name, {each for each in given if given[each] != own}): own
            for name, own in given.items()
            if own != default
        }

    experts = {module.name for module in modules if isinstance(module, FusedExperts)}
    parameters = sorted(
        {".".join(name.split(".")[-3:]) for name in experts} | {target(name, others) for name in weights}
    )
    full = {
        key.removeprefix(PREFIX).rpartition(".")[0]
        for keys in saved_keys(model, lora, places, head).values()
        for key in keys
    }
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.output_head == "reward" else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        "rank_pattern": pattern(0, lora.rank),
        "alpha_pattern": pattern(1, lora.alpha),
        "use_rslora": lora.scaling == "rslora",
        "use_dora": lora.dora,
        "lora_dropout": 0.0 if parameters else lora.dropout,  # PEFT has none on parameters
        "target_modules": sorted(
            {target(module.name, others) for module in modules if module.name not in weights | experts}
        ),
        "modules_to_save": sorted({_target(name, set(numbers) | others - full) for name in full}) or None,
        "ensure_weight_tying": model.tied_head and EMBEDDING in saved(model, lora),
        "fan_in_fan_out": any(module.transposed for module in modules),
        "bias": "none",
        "inference_mode": True,
        **({"target_parameters": parameters} if parameters else {}),
    }


def _as_weights(modules: Sequence[AdaptedModule], family: str, dora: bool) -> set[str]:
    """Return the modules that PEFT must target by their weight.

    Raises ConversionError with DoRA, which PEFT does not support for parameters.
    """
    as_weights = {module.name for module in modules if module.as_weight(family)}
    if dora and as_weights:
        raise ConversionError(
            f"PEFT does not support DoRA for {min(as_weights)} of a {family} model, because the adapter "
            "must target its parameter. Export the merged model with `megalite convert export`, or remove "
            "gate, up and down from lora.targets."
        )
    return as_weights


def _check_accepted(modules: Sequence[AdaptedModule], family: str) -> None:
    """Raise ConversionError for a module whose adapter PEFT refuses or does not load in a family."""
    if family not in REFUSED:
        return
    does, part, targets = REFUSED[family]
    refused = [each.name for each in modules if part in each.name]
    if refused:
        raise ConversionError(
            f"PEFT {does} adapters of {refused[0]} in a {family} model. Export the merged model with "
            f"`megalite convert export`, or remove {targets} from lora.targets."
        )


def _without_dropout(lora: LoraConfig, settings: dict[str, Any]) -> list[str]:
    """Return a note if the settings do not include the dropout of the run."""
    if settings["lora_dropout"] == lora.dropout:
        return []
    return [
        f"lora_dropout was {lora.dropout} in the run but is exported as 0, because PEFT does not support "
        "dropout with target_parameters. This only affects further training"
    ]


def _numbers(module: AdaptedModule, adapters: Adapters) -> tuple[int, float]:
    """Return the rank and alpha of a module.

    They are computed from its first weight, whose factor on B A applies to the whole module.
    """
    first = next(iter(module.weights))
    rank = sum(adapters.pairs[name].b.shape[1] for name in module.weights)
    divisor = rank**0.5 if adapters.lora.scaling == "rslora" else rank
    return rank, _plain(adapters.pairs[first].scale * divisor)


def _plain(number: float) -> float:
    """Return a number without rounding errors of a division, as an integer if it is whole."""
    rounded = float(f"{number:.12g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _target(name: str, others: set[str]) -> str:
    """Return the shortest suffix of a module's name that matches no module without an adapter.

    This is the last word, except for GPT-2's two c_proj.
    """
    words = name.split(".")
    ends = (".".join(words[start:]) for start in reversed(range(len(words))))
    return next(end for end in ends if not any(other.endswith(f".{end}") for other in others))
