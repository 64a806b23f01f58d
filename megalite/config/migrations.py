"""Options that earlier versions named otherwise: their former names and values, and what they are now.

The loader applies these tables to files, command lines and stored configurations before it converts values.
"""

from collections.abc import Mapping
from typing import Any

from megalite.config import run_files
from megalite.config.errors import ConfigError

NAMES = {"train.fp32_products": "train.fp32_matmul"}
"""Former name of an option → its name."""
VALUES: dict[str, dict[str, str]] = {
    "train.grad_dtype": {"wide": "fp32"},
    "parallel.reduce_dtype": {"wide": "fp32"},
}
"""Option → former name of one of its values → its name."""
FILES = {run_files.FP32_MATMUL: "products.json"}
"""File in a run's directory → its former name."""


def migrated(options: Mapping[str, Any], source: str, advice: list[str]) -> dict[str, Any]:
    """Returns section.key → value with the present names of options and values.

    Args:
        source: where the options are from, for messages.
        advice: takes one line for each former name.

    Raises:
        ConfigError: an option has both of its names.
    """
    present: dict[str, Any] = {}
    for option, value in options.items():
        name = NAMES.get(option, option)
        if name != option:
            if name in options:
                raise ConfigError(
                    f"{option} {source} was renamed to {name}, which is also set. Remove {option}."
                )
            advice.append(f"{option} {source} is {name} now.")
        names = VALUES.get(name, {})
        if isinstance(value, str) and value in names:
            advice.append(f"{name} = {value} {source} is {names[value]} now.")
            value = names[value]
        present[name] = value
    return present
