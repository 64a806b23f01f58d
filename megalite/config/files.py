"""YAML files of a configuration, and those that are shipped with megalite."""

import os
import re
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from megalite.config import run_files
from megalite.config.checkout import CONFIGS
from megalite.config.errors import ConfigError
from megalite.config.rule import suggestion
from megalite.families.presets import presets


def read_tree(path: str, option: str) -> Any:
    """The content of a YAML file.

    Args:
        option: the option that names it, for messages.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"), path, option)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{option} = {path} cannot be read: {reason}. {_nearest_file(path)}") from None


def is_of_run(path: str) -> bool:
    """Whether a file is the configuration that a run has stored in its directory."""
    file = Path(path)
    return file.name == run_files.CONFIG and any(
        (file.parent / name).exists() for name in (run_files.METRICS, run_files.CHECKPOINTS)
    )


def parse_yaml(text: str, path: str, option: str) -> Any:
    """The content of a YAML text.

    Args:
        path, option: where it is from, for messages.

    Raises:
        ConfigError: it is none.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 3e-4 as a number and refuses duplicate keys: YAML 1.1 reads it as text and silently keeps the
        last of equal keys."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key} appears twice", node.start_mark
                    )
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
    )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        if problem.startswith("but "):  # the half of a sentence
            problem = f"{getattr(error, 'context', '')}, {problem}"
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{option} = {path} is not valid YAML: {problem}{where}.") from None


def shipped_configs() -> dict[str, str]:
    """The configurations shipped with megalite: name → first sentence of the file's comment."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in CONFIGS.glob("*.yaml")}
    return {name: _first_sentence(texts[name]) for name in sorted(texts)}


def _first_sentence(text: str) -> str:
    comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".") + "."


def config_file(given: str) -> str:
    """The path of `--config`: a file or, if there is none of that name, a configuration shipped with
    megalite."""
    given = os.path.expanduser(given)
    if Path(given).is_file() or Path(given).name != given or Path(given).suffix in (".yaml", ".yml"):
        return given
    shipped = CONFIGS / f"{given}.yaml"
    if not shipped.is_file():
        if given in presets():
            raise ConfigError(
                f"--config = {given} is a preset, which contains only the shape of a model. Pass it as "
                f"--model.preset {given}."
            )
        near = suggestion(given, shipped_configs()) or " megalite train --list_configs lists those."
        raise ConfigError(
            f"--config = {given} is neither a file nor a configuration shipped with megalite.{near}"
        )
    return str(shipped)


def _nearest_file(path: str) -> str:
    others = {
        other.stem: str(other)
        for end in ("*.yaml", "*.yml")
        for other in sorted(Path(path).parent.glob(end))
        if other.is_file()
    }
    near = get_close_matches(Path(path).stem, others, n=1)
    return (
        f"Nearest: {others[near[0]]}."
        if near
        else "Give the path of a YAML file, or a name of megalite train --list_configs."
    )
