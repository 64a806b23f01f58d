"""PEFT's names of modules in the options of adapters → megalite's: `q_proj` is q, `query_key_value` is q, k
and v.

The names are those of the model's family, if its directory says which it is, else those of all families. As
in PEFT, a name means every module of a layer whose name ends with it: GPT-2's `c_proj` is o and down,
`attn.c_proj` is o.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.rule import Mistakes, show, suggestion
from megalite.config.sections.lora import BUILT_IN_PROJECTIONS, EXPERTS, MIXERS, PROJECTIONS, SAVED_MODULES
from megalite.families.model_config import hf_config
from megalite.families.module_names import FAMILY_NAMES, Names

ALL = "all-linear"
FUSED = {
    "experts.gate_up_proj": "experts.in",
    "experts.up_proj": "experts.in",
    "experts.down_proj": "experts.down",
}
"""The end of PEFT's names of the parameters that hold all experts of a layer → ours."""


def with_own_names(given: dict[str, Any]) -> dict[str, Any]:
    """The options of adapters among those given, with megalite's names. Raises ConfigError on a name that the
    family does not have."""
    family = _family(given)
    tables = {
        name: table for name, table in FAMILY_NAMES.items() if family in (None, name.partition(",")[0])
    } or FAMILY_NAMES
    mixture = any("mlp.experts.in" in table.layer.values() for table in tables.values())
    modules = _projections(tables, frozenset() if family in tables else _absent(given))
    gates = ("gate", "attention_gate") if given.get("model.attention_gate") else ("gate",)
    there = {*gates, *(part for parts in modules.values() for part in parts)}
    # families know the built-in ones; others are of registered kinds of blocks
    projections = tuple(role for role in PROJECTIONS if role in there or role not in BUILT_IN_PROJECTIONS)
    own_names = (*projections, *(EXPERTS if mixture else ()))
    whose = f"a {family} model" if family in tables else "any family"
    options: dict[str, Any] = {}
    mistakes = Mistakes()
    if targets := given.get("lora.targets"):
        with mistakes.collected():
            own = _translated("lora.targets", targets, modules, (ALL, *own_names), f"projection of {whose}")
            experts = [name for name in own if name in EXPERTS]  # which all-linear does not mean
            options["lora.targets"] = own if ALL not in own else [*projections, *experts] if experts else None
    if saved := given.get("lora.modules_to_save"):
        what = f"module of {whose} that can be trained in full"
        with mistakes.collected():
            options["lora.modules_to_save"] = _translated(
                "lora.modules_to_save", saved, _ends(tables), SAVED_MODULES, what
            )
    for option in ("lora.ranks", "lora.alphas"):
        with mistakes.collected():
            if values := _by_own_names(
                option, given.get(option) or {}, modules, own_names, f"projection of {whose}"
            ):
                options[option] = values
    mistakes.report()
    return options


def _by_own_names(
    option: str, given: dict[str, Any], modules: dict[str, list[str]], own_names: tuple[str, ...], what: str
) -> dict[str, Any]:
    """A mapping from projections, by our names."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        own = _translated(option, [str(name)], modules, own_names, what, given)
        if twice := values.keys() & own:
            raise ConfigError(
                f"{option} = {show(given)} contains {sorted(twice)[0]} twice. Remove one of the entries."
            )
        values |= dict.fromkeys(own, value)
    return values


def _family(given: dict[str, Any]) -> str | None:
    """The model's family, by the directory of its shape or of its weights; None: no directory says it."""
    start = given.get("model.init_from") or ""
    for directory in (
        given.get("model.from_hf"),
        start.removeprefix("hf:") if start.startswith("hf:") else None,
    ):
        with suppress(ConfigError):  # a directory without config.json is refused by a rule
            if directory and (family := hf_config(directory).get("model_type")):
                return str(family)
    return None


def _translated(
    option: str,
    names: list[str],
    theirs: dict[str, list[str]],
    ours: tuple[str, ...],
    what: str,
    value: Any = None,
) -> list[str]:
    own: dict[str, None] = {}
    for name in names:
        fused = [own for end, own in FUSED.items() if own in ours and _ends_with(name, end)]
        modules = [part for module, parts in theirs.items() if _ends_with(module, name) for part in parts]
        parts = [name] if name in ours else fused or modules
        if not parts:
            legal = [*ours, *dict.fromkeys(module.rpartition(".")[2] for module in theirs)]
            listed = f"Legal values: {', '.join(legal)}.{suggestion(name, legal)}"
            raise ConfigError(
                f"{option} = {show(value or names)} contains {name}, which is not a {what}. {listed}"
            )
        own |= dict.fromkeys(parts)
    return list(own)


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _absent(given: dict[str, Any]) -> frozenset[str]:
    """The projections of blocks that a model of no known family has only if its options say so."""
    blocks = str(given.get("model.layer_blocks") or "")
    named = {"delta": "delta", "mamba": "mamba", "conv": "convolution"}
    absent = {
        f"{mixer}_{part}" for mixer, parts in MIXERS.items() if named[mixer] not in blocks for part in parts
    }
    return frozenset(absent | (set() if given.get("model.attention_gate") else {"attention_gate"}))


def _modules(
    tables: dict[str, Names], of: Callable[[Names], dict[str, str]], known: Callable[[Names], dict[str, str]]
) -> dict[str, list[str]]:
    """Hugging Face module → our names of its parts, in all tables, for the modules that have some."""
    modules: dict[str, list[str]] = {}
    for table in tables.values():
        names = known(table)
        for theirs, ours in of(table).items():
            parts = [names[part] for part in ours.split() if part in names]
            modules[theirs] = list(dict.fromkeys(modules.get(theirs, []) + parts))
    return {theirs: parts for theirs, parts in modules.items() if parts}


def _projections(tables: dict[str, Names], absent: frozenset[str]) -> dict[str, list[str]]:
    """The same for projections, without some roles."""
    own = {
        f"{'mlp' if role in ('gate', 'up', 'down') else 'attention'}.{role}": role for role in PROJECTIONS
    } | {"attention.out": "o", "attention.gate": "attention_gate"}
    own |= {f"mlp.shared.{role}": role for role in ("gate", "up", "down")}  # of a shared expert

    def known(table: Names) -> dict[str, str]:
        parts = MIXERS.get(table.mixer.removesuffix("_"), ())
        mixer = {f"mixer.{'out' if part == 'o' else part}": f"{table.mixer}{part}" for part in parts}
        return {ours: role for ours, role in (own | mixer).items() if role not in absent}

    return _modules(tables, lambda table: table.layer, known)


def _ends(tables: dict[str, Names]) -> dict[str, list[str]]:
    return _modules(tables, lambda table: table.ends, lambda _: {"embedding": "embedding", "head": "head"})
