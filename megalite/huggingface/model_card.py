"""The model card of an export (README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megalite
from megalite.checkpoint import Manifest
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.config.token_files import is_chat, metadata, prefixes
from megalite.data.tokenizer.identity import TokenizerIdentity
from megalite.families.hub import repository
from megalite.system.files import write_synced

CARD = "README.md"
_MODEL = """\
```python
from transformers import {loader}, {reader}

model = {loader}.from_pretrained("{name}", dtype="auto")
{tokenizer}```
"""
_ADAPTER = """\
```python
from peft import PeftModel
from transformers import {loader}, {reader}

base = {loader}.from_pretrained("{base}", {labels}dtype="auto")
model = PeftModel.from_pretrained(base, "{name}")
{tokenizer}```
"""

NAMES = {"adamw": "AdamW", "muon": "AdamW", "lion": "Lion", "ademamix": "AdEMAMix"}
"""What updates tensors other than Muon's matrices, by optimizer.name."""


def write_card(
    directory: Path,
    manifest: Manifest,
    tokenizer: TokenizerIdentity | None,
    facts: Mapping[str, Any],
    *,
    reader: str = "AutoTokenizer",
    loader: str = "AutoModelForCausalLM",
    base: str | None = None,
) -> None:
    """Write README.md.

    Args:
        tokenizer: the one in the directory; None if there is none.
        reader: the class of transformers that reads it.
        loader: the class of transformers that loads the model, or that which an adapter adapts.
        facts: further rows of its table, such as parameters and dtypes.
        base: of an adapter, the directory of the model that it adapts.
    """
    state, config = manifest.state, from_dict(manifest.state["config"])
    name = directory.name.removeprefix(".").removesuffix(".new")
    adapter, reward = base is not None, config.model.output_head == "reward"
    about = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if reward else "text-generation",
        "tags": ["megalite"],
    }
    head = "".join(
        f"{key}: {json.dumps(value)}\n"
        for key, value in (about | ({"base_model": base} if base else {})).items()
    )
    rows = dict(facts) | _trained(config, state) | _tokenizer(tokenizer) | {"megalite": _version(state)}
    table = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    reads = f'tokenizer = {reader}.from_pretrained("{name}")\n' if tokenizer is not None else ""
    labels = "num_labels=1, " if reward else ""  # a base that is a language model does not say it
    usage = (_ADAPTER if adapter else _MODEL).format(
        name=name, base=base, tokenizer=reads, reader=reader, loader=loader, labels=labels
    )
    parts = [f"---\n{head}---\n\n# {name}\n", f"| | |\n|---|---|\n{table}", usage]
    if config.data.train is not None:
        parts.append(
            "## Configuration\n\nOptions that differ from megalite's "
            f"defaults:\n\n```yaml\n{_options(config)}```\n"
        )
    write_synced(directory / CARD, "\n".join(parts))


def _options(config: Config) -> str:
    """Return the run's options other than their defaults, as YAML."""
    import yaml

    defaults = to_dict(Config())
    changed = {
        section: {name: value for name, value in values.items() if value != defaults[section][name]}
        for section, values in to_dict(config).items()
    }
    return yaml.safe_dump(
        {section: values for section, values in changed.items() if values},
        sort_keys=False,
        allow_unicode=True,
    )


def _version(state: dict[str, Any]) -> str:
    trained = state.get("software", {}).get("megalite")
    return f"exported by {megalite.__version__}" + (f", trained with {trained}" if trained else "")


def _trained(config: Config, state: dict[str, Any]) -> dict[str, str]:
    """Return data, tokens and options of the training; empty for a model that was only converted."""
    if config.data.train is None:
        return {}
    optimizer, muon = config.optimizer, config.muon
    matrices = (
        f"Muon for matrices, learning rate {muon.lr:g}, weight decay {muon.weight_decay:g}; "
        if optimizer.name == "muon"
        else ""
    )
    counts = {prefix: metadata(prefix).get("tokens") for prefix in prefixes(config.data.train)}
    samples, step, length = state.get("samples", 0), state.get("step", 0), config.data.sequence_length
    # rows of conversations are padded
    seen = "positions seen" if any(map(is_chat, counts)) else "tokens seen"
    rows = {
        "data": ", ".join(
            prefix + (f" ({count:,} tokens)" if count else "") for prefix, count in counts.items()
        ),
        "data fingerprint": str(state.get("fingerprint")),
        "steps": f"{step:,} of {config.train.steps:,}",
        seen: f"{samples * length:,} ({samples:,} samples of {length:,})",
        "global batch": f"{config.train.global_batch_size:,} samples",
        "optimizer": f"{matrices}{NAMES.get(optimizer.name, optimizer.name)}, learning rate "
        f"{optimizer.lr:g} ({optimizer.decay}), weight decay {optimizer.weight_decay:g}",
        "precision": config.train.precision,
    }
    start = config.model.init_from
    return rows | ({"started from": repository(start.removeprefix("hf:"))} if start else {})


def _tokenizer(identity: TokenizerIdentity | None) -> dict[str, str]:
    if identity is None:
        return {"tokenizer": "not included"}
    known = f", fingerprint {identity.fingerprint}" if identity.fingerprint else ""
    template = {"chat template": f"hash {identity.template_hash}"} if identity.template_hash else {}
    return {"tokenizer": f"{Path(identity.name or '').name}{known}"} | template
