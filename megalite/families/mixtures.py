"""The fields of mixtures in families whose code is DeepSeek-V3's with fewer fields. Imports no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field whose value
transformers cannot compute.
"""

from __future__ import annotations

from typing import Any

from megalite.families.refusal import refuse


def routed(given: dict[str, Any]) -> int:
    """The number of experts, which has no default, as that of a token's experts."""
    for name in ("n_routed_experts", "num_experts_per_tok"):
        if not given[name]:
            raise refuse(name, given[name], "is not supported. Legal values: 1 and above.")
    return int(given["n_routed_experts"])


def groups(given: dict[str, Any]) -> int | None:
    return None if given["n_group"] in (None, 1) else int(given["n_group"])


def topk_group(given: dict[str, Any]) -> int:
    return chosen_groups(given, groups(given))


def chosen_groups(given: dict[str, Any], number: int | None) -> int:
    """The number of groups that a token's experts are of.

    Args:
        number: of all groups; None: there are none.
    """
    if number is None:
        return 1
    if given["topk_group"] is None:
        raise refuse(
            "topk_group", None, f"is incompatible with n_group = {given['n_group']}. It needs a number."
        )
    return int(given["topk_group"])


def group_score(given: dict[str, Any]) -> str:
    """Mistral 4 has DeepSeek-V3's score of a group with DeepSeek-V2's probabilities."""
    return "auto" if groups(given) is None else "two_largest"
