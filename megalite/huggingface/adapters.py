"""Adapters (LoRA) in PEFT's format: export from a checkpoint, and import into a run that starts from them.

PEFT has one A and one B for each module of a Hugging Face model, in any floating-point dtype:

    base_model.model.MODULE.lora_A.weight  [rank, in]        base_model.model.MODULE.lora_B.weight  [out, rank]

If a module fuses n of our projections (Phi-3's qkv_proj, GPT-2's c_attn), its adapter has rank n · r: A is our A's concatenated by rows,
and B is block-diagonal with our B's. An import also accepts a single A of rank r for all of them, which each of our projections copies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.checkout import command
from megalite.checkpoint import directories
from megalite.checkpoint.chunks import name_of
from megalite.config.hub import repository
from megalite.config.schema import Config, LoraConfig
from megalite.huggingface import convert as converting
from megalite.huggingface.convert import HF, NAMED, WEIGHT, model_of, places_of
from megalite.huggingface.files import ConversionError, NewFile, Weights
from megalite.huggingface.merging import Adapters, adapted, adapter_names
from megalite.huggingface.model_card import write_card
from megalite.huggingface.names import Place
from megalite.huggingface.tokenizer_export import TokenizerChoice, choose, write_tokenizer
from megalite.parallel.spec import Rectangle

Read = Callable[[Sequence[Rectangle]], None]
SETTINGS, FILES = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_FREE = """peft_type task_type peft_version auto_mapping base_model_name_or_path revision inference_mode r lora_alpha rank_pattern
    alpha_pattern use_rslora target_modules exclude_modules layers_to_transform layers_pattern lora_dropout fan_in_fan_out bias
    init_lora_weights runtime_config ensure_weight_tying megatron_core qalora_group_size eva_config loftq_config corda_config
    lora_ga_config"""
"""Settings that are read, or that do not change what an adapter computes; any other setting must be off."""
STARTS_FROM_W = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged; others (pissa, olora …) change the weights that the adapter adapts."""


@dataclass(frozen=True)
class Module:
    """A Hugging Face module, and our adapted weights that are stored in it, each with its place."""

    name: str
    weights: dict[str, Place]

    @property
    def keys(self) -> tuple[str, str]:
        """PEFT's names of A and B."""
        return f"base_model.model.{self.name}.lora_A.weight", f"base_model.model.{self.name}.lora_B.weight"

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and inputs of the whole module."""
        place = next(iter(self.weights.values()))
        outputs, inputs = reversed(place.shape) if place.transposed else place.shape
        return outputs, inputs

    @property
    def transposed(self) -> bool:
        return any(place.transposed for place in self.weights.values())

    def rows(self, weight: str) -> list[int]:
        """The module's outputs that belong to one of our weights, in our order."""
        return list(self.weights[weight].rows)


def modules_of(found: dict[str, Place], weights: Iterable[str]) -> list[Module]:
    """The Hugging Face modules that hold our adapted weights."""
    grouped: dict[str, dict[str, Place]] = {}
    for name in weights:
        grouped.setdefault(_module(found[name]), {})[name] = found[name]
    return [Module(name, own) for name, own in grouped.items()]


def _module(place: Place) -> str:
    return place.theirs.removesuffix(".weight")


# ---- export


def export_adapter(directory: Path, target: Path) -> dict[str, Any]:
    """Write the adapters of a checkpoint as a PEFT directory; returns a summary for display.

    Raises ConfigError or CheckpointError; the directory gets its name only when it is complete.
    """
    if target.exists():
        raise ConversionError(f"{target} exists already. Give another name, or remove it.")
    manifest = checkpoint.manifest_of(directory)
    manifest.check_files()
    model, adapters = model_of(manifest), Adapters(manifest)
    if not adapters.pairs:
        raise ConversionError(
            f"{directory} holds no adapters: it was trained without lora.rank. Export it with {command('convert')} export."
        )
    found = places_of(model, directory)
    modules = modules_of(found, adapters.pairs)
    tensors = {key: value for module in modules for key, value in zip(module.keys, _joined(module, adapters), strict=True)}
    start = model.initial_weights or ""
    base = start.removeprefix(HF) if start.startswith(HF) else model.from_hf
    base = base and repository(base)
    tokenizer = choose(manifest, TokenizerChoice(), converting.origin(directory, model))
    parameters, dtypes = sum(value.numel() for value in tensors.values()), {name_of(value.dtype) for value in tensors.values()}
    with converting.new_directory(target) as temporary:
        with closing(NewFile(temporary / FILES[0], {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()})) as file:
            for name, value in tensors.items():
                file.write(name, value)
        directories.write_synced(temporary / SETTINGS, json.dumps(_settings(modules, found, adapters.lora, base), indent=2) + "\n")
        identity = write_tokenizer(temporary, tokenizer, manifest.state["step"])
        facts = {"adapter": f"LoRA of rank {adapters.lora.rank}", "parameters": f"{parameters:,}", "dtype": ", ".join(sorted(dtypes))}
        write_card(temporary, manifest, identity, facts, base=base or "")
    return {"rank": adapters.lora.rank, "parameters": parameters, "dtypes": sorted(dtypes), "modules": [each.name for each in modules]} | {
        "tokenizer": tokenizer.name,
        "notes": tokenizer.notes,
    }


def _joined(module: Module, adapters: Adapters) -> tuple[Tensor, Tensor]:
    """PEFT's A and B of a module: [ranks, in] and [out, ranks], where ranks = rank · number of our weights in it."""
    pairs, rank = [adapters.pairs[name] for name in module.weights], adapters.lora.rank
    a = torch.cat([a for a, _ in pairs])
    b = a.new_zeros(module.shape[0], len(a))
    for index, (name, (_, own)) in enumerate(zip(module.weights, pairs, strict=True)):
        b[module.rows(name), index * rank : (index + 1) * rank] = own
    return a, b


def _settings(modules: Sequence[Module], found: dict[str, Place], lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    others = {_module(place) for place in found.values()} - {module.name for module in modules}
    targets = {module.name: _target(module.name, others) for module in modules}
    joined = {targets[module.name]: len(module.weights) for module in modules if len(module.weights) > 1}
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: count * lora.rank for name, count in joined.items()},
        "alpha_pattern": {name: count * alpha for name, count in joined.items()},
        "lora_dropout": lora.dropout,
        "target_modules": sorted(set(targets.values())),
        "fan_in_fan_out": any(module.transposed for module in modules),
        "bias": "none",
        "inference_mode": True,
    }


def _target(name: str, others: set[str]) -> str:
    """The shortest suffix of a module's name that matches no module without an adapter: the last word, except for GPT-2's two c_proj."""
    words = name.split(".")
    ends = (".".join(words[start:]) for start in reversed(range(len(words))))
    return next(end for end in ends if not any(other.endswith(f".{end}") for other in others))


# ---- import


def starting_weights(config: Config) -> Read:
    """The function that fills a rank's rectangles when a run starts from hf:DIR or from an adapter; it raises CheckpointError."""
    base = converting.starting_weights(config.model)
    if config.lora.init_from is not None:
        return partial(_fill, config, base)
    assert base is not None, "a checkpoint alone gives the weights"
    return base


def _fill(config: Config, base: Read | None, rectangles: Sequence[Rectangle]) -> None:
    own = {WEIGHT + name for weight in adapted(config.model, config.lora) for name in adapter_names(weight)}
    start = Path(config.model.initial_weights or "")
    if base is None:
        manifest = checkpoint.manifest_of(start)
        if config.checkpoint.verify == "full":
            manifest.verify(0, 1)
        base = partial(checkpoint.load, manifest, convert=True)
    base([part for part in rectangles if part.name not in own])
    adapter = PeftAdapter(config, start)
    for part in rectangles:
        if part.name in own:
            whole = adapter[part.name.removeprefix(WEIGHT)]
            part.tensor.copy_(whole[tuple(slice(low, low + size) for low, size in zip(part.offsets, part.tensor.shape, strict=True))])


class PeftAdapter:
    """A PEFT directory read as the adapters of a run: our A's and B's by name. Raises ConversionError if it does not fit them.

    The product that it adds to the weights is preserved: if its alpha / rank differs from the run's, B is scaled.
    """

    def __init__(self, config: Config, start: Path):
        self.lora, self.directory = config.lora, Path(config.lora.init_from or "")
        self.settings = _read_settings(self.directory)
        self.tensors = Weights(self.directory, FILES)
        self.modules = modules_of(places_of(config.model, start), adapted(config.model, config.lora))
        self._check([key for module in self.modules for key in module.keys])
        self._where = {name: (module, weight) for module in self.modules for weight in module.weights for name in adapter_names(weight)}

    def _check(self, expected: Sequence[str]) -> None:
        problems = [f"{key} is missing" for key in expected if key not in self.tensors]
        problems += [f"{key} is no adapter of lora.targets" for key in self.tensors if key not in expected]
        for module in () if problems else self.modules:
            problems += self._misfits(module)
        if problems:
            more = f"\n  … and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
            raise ConversionError(
                f"lora.init_from = {self.directory} does not hold the adapters of this run:\n  " + "\n  ".join(problems[:NAMED]) + more
            )

    def _misfits(self, module: Module) -> Iterator[str]:
        """What of a module's A and B does not fit the run's adapters."""
        a, b = (self.tensors[key] for key in module.keys)
        rank, count, (outputs, inputs) = self.lora.rank, len(module.weights), module.shape
        if (*a.shape, *b.shape) != (len(a), inputs, outputs, len(a)):
            yield f"{module.name} has A {list(a.shape)} and B {list(b.shape)}, and the model {inputs} inputs and {outputs} outputs there"
        elif len(a) != rank and (len(a) != count * rank or self._outside(module, b, blocks=True)):
            yield f"{module.name} has rank {len(a)}, and lora.rank = {rank}"
        elif self._outside(module, b, blocks=False):
            yield f"{module.name} adapts outputs that are not among lora.targets"

    def _outside(self, module: Module, b: Tensor, blocks: bool) -> bool:
        """Whether B is nonzero outside the rows of our projections or, with `blocks`, outside their blocks on its diagonal."""
        rank, rest = self.lora.rank, b.clone()
        for index, name in enumerate(module.weights):
            rest[module.rows(name), slice(index * rank, (index + 1) * rank) if blocks else slice(None)] = 0
        return bool(rest.any())

    def _scale(self, module: Module, rank: int) -> float:
        """PEFT's factor on a module's B A."""
        alpha = _by_pattern(self.settings.get("alpha_pattern"), module.name, self.settings["lora_alpha"])
        return float(alpha / (rank**0.5 if self.settings.get("use_rslora") else rank))

    def __getitem__(self, name: str) -> Tensor:
        """One of our tensors: A [rank, in] or B [out, rank]."""
        module, weight = self._where[name]
        a, b = (self.tensors[key] for key in module.keys)
        rank, index = self.lora.rank, list(module.weights).index(weight)
        own = slice(None) if len(a) == rank else slice(index * rank, (index + 1) * rank)
        if name == adapter_names(weight)[0]:
            return a[own]
        factor = self._scale(module, len(a)) / (self.lora.alpha / rank)
        values = b[module.rows(weight), own]
        return values if factor == 1 else values.to(torch.promote_types(values.dtype, torch.float32)) * factor


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the module's name, as in PEFT."""
    return next((value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module)), default)


def _read_settings(directory: Path) -> dict[str, Any]:
    """adapter_config.json. Raises ConversionError if the adapter is not plain LoRA."""
    path = directory / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind, start, bias = settings["peft_type"], settings.get("init_lora_weights", True), settings.get("bias", "none")
        wrong = [f"{name} = {value}" for name, value in settings.items() if name not in _FREE.split() and value]
        wrong += [f"{name} = {value}" for name, value, good in (("peft_type", kind, "LORA"), ("bias", bias, "none")) if value != good]
        wrong += [] if start in STARTS_FROM_W else [f"init_lora_weights = {start}"]
        settings["lora_alpha"] / settings["r"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConversionError(f"{path} can not be read as the settings of a LoRA adapter: {type(error).__name__}: {error}") from None
    if wrong:
        raise ConversionError(f"{path} has {wrong[0]}, which is not handled: only plain LoRA is.")
    return settings
