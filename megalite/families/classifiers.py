"""Reward models as transformers' sequence classifiers with one label.

Their head, `score`, has one row, and the reward of a text is its value at the last token that is not padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config.errors import ConfigError
from megalite.families.refusal import refuse

MODULE = "score"
"""The module of the head, without the prefix of the model."""
_SUFFIX = "ForSequenceClassification"
_REGULAR = (
    *("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma", "gemma2", "smollm3", "starcoder2"),
    *("nemotron", "stablelm", "gpt_neox", "olmo3", "glm", "glm4", "falcon", "ministral", "arcee"),
    *("seed_oss", "hunyuan_v1_dense", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
    *("gpt_oss", "hunyuan_v1_moe", "exaone4", "ministral3", "mistral4", "qwen3_next"),
)
_OTHERS = {"gpt2": "GPT2", "gemma3_text": "Gemma3Text", "qwen3_5_text": "Qwen3_5Text"}


def classifier_of(model_type: str, architecture: str) -> str | None:
    """Return transformers' sequence classifier of a family, or None if it has none.

    Args:
        architecture: the family's language model.
    """
    if model_type in _OTHERS:
        return _OTHERS[model_type] + _SUFFIX
    return architecture.removesuffix("ForCausalLM") + _SUFFIX if model_type in _REGULAR else None


def is_reward_model(config: Mapping[str, Any], classifier: str | None) -> bool:
    """Return whether a config.json is that of a reward model.

    Raises ConfigError if it is another classifier.
    """
    named = config.get("architectures") or []
    if not any(str(each).endswith(_SUFFIX) for each in named):
        return False
    if named != [classifier]:
        legal = "no sequence classifier" if classifier is None else classifier
        raise refuse("architectures", named, f"is not supported. transformers has {legal} in this family.")
    # transformers writes the labels, 2 by default, and not their number
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise refuse("id2label", config.get("id2label"), "is not supported. A reward model has one label.")
    return True


def fields_of(classifier: str | None, model_type: str) -> dict[str, Any]:
    """Return the fields of config.json of a reward model.

    Raises ConfigError if the family has no classifier.
    """
    if classifier is None:
        raise ConfigError(
            f"model.output_head = 'reward', but transformers has no sequence classifier of {model_type}"
        )
    return {"architectures": [classifier], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def padding_of(ids: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the token ids of a reward model, and notes about them.

    transformers takes the reward at the last token that is not padding, which must not be a text's last one.
    """
    pad, ends = ids["pad_token_id"], ids["eos_token_id"]
    if pad is not None and pad not in (ends if isinstance(ends, list) else [ends]):
        return dict(ids), []
    note = (
        "the tokenizer has no padding token that differs from the tokens that end a text: transformers can "
        "score one text at a time, and batches once config.pad_token_id is such a token"
    )
    return {**ids, "pad_token_id": None}, [note]
