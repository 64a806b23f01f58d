"""What the token files that a configuration names say about themselves."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.schema import Config, ConfigError


@dataclass(frozen=True)
class TokenFile:
    """What PREFIX.json says about PREFIX.bin: the tokenizer's vocabulary size and end-of-document token, None where unsaid."""

    vocab_size: int | None
    eos: int | None


def prefixes(source: Any) -> list[str]:
    """The token file prefixes that data.train or data.validation names; a held-out fraction names none."""
    if isinstance(source, str):
        return [source]
    return list(source) if isinstance(source, (list, dict)) else []


def token_file(prefix: str) -> TokenFile:
    """Read PREFIX.json; a file without one (written by other tools) leaves everything unsaid. Raises ConfigError where it is broken."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return TokenFile(None, None)
    try:
        content = json.loads(path.read_text())
        return TokenFile(content.get("vocab_size"), content.get("eos"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a JSON object ({error}): write the token file anew, or remove it.") from None


def data_vocab_size(config: Config) -> int | None:
    """The vocabulary of the training data, None where no PREFIX.json says it."""
    return max((size for prefix in prefixes(config.data.train) if (size := token_file(prefix).vocab_size)), default=None)
