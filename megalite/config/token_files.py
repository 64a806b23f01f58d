"""What the token files that a configuration names say about themselves."""

import json
from pathlib import Path
from typing import Any

from megalite.config.schema import Config, ConfigError


def prefixes(source: Any) -> list[str]:
    """The token file prefixes that data.train or data.validation names; a held-out fraction names none."""
    if isinstance(source, str):
        return [source]
    return list(source) if isinstance(source, (list, dict)) else []


def metadata(prefix: str | Path) -> dict[str, Any]:
    """PREFIX.json: `vocab_size`, `eos` and `tokenizer`, for chat data `chat`; empty where there is none, as beside a file of Megatron-LM's.

    Raises ConfigError where it is broken.
    """
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return {}
    try:
        content, problem = json.loads(path.read_text(encoding="utf-8")), "it is something else"
    except (OSError, ValueError) as error:
        content, problem = None, str(error)
    if not isinstance(content, dict):
        way_out = 'Prepare the data again, or write {"vocab_size": V, "eos": ID} into it.'
        raise ConfigError(f"{path} is not a JSON object ({problem}). {way_out}")
    return content


def is_chat(prefix: str | Path) -> bool:
    """Whether the documents of a token file are conversations, with a mask of the loss beside them."""
    return "chat" in metadata(prefix)


def data_vocab_size(config: Config) -> int | None:
    """The vocabulary of the training data, None where no PREFIX.json says it."""
    return max((size for prefix in prefixes(config.data.train) if (size := metadata(prefix).get("vocab_size"))), default=None)
