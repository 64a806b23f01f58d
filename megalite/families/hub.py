"""Models of the Hugging Face Hub: `org/name` where a Hugging Face directory is expected.

What is complete in the Hub's cache is used as it is, with or without a network; the rest is fetched into the
cache. On each node local rank 0 fetches, and the other ranks wait until it has finished. An interrupted
download leaves a mark beside its lock, and is resumed where there is a network.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

from megalite.config.errors import ConfigError
from megalite.config.repository_id import SECOND_MODELS, is_repository_id
from megalite.families.weight_files import ADAPTER_SETTINGS, MODEL

Part = Literal["shape", "tokenizer", "weights"]
"""What is needed of a model; the weights include the other two."""
CONFIG = ("config.json", "generation_config.json")
TEMPLATES = "additional_chat_templates/*.jinja"
TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "spiece.model",
    TEMPLATES,
)
WEIGHTS = (*MODEL[:2], "model-*.safetensors", ADAPTER_SETTINGS)
FOLDERS = tuple(f"{pattern}/*" for pattern in (*TOKENIZER, *WEIGHTS) if "*" in pattern and "/" not in pattern)
"""Files in folders, whose names begin like those of files."""
PATTERNS: dict[Part, tuple[str, ...]] = {
    "shape": (*CONFIG, *TOKENIZER),  # the tokenizer is compared with that of the data
    "tokenizer": (*CONFIG, *TOKENIZER),
    "weights": (*CONFIG, *TOKENIZER, *WEIGHTS),
}
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A tokenizer has one of these files."""
PROBE_S = 4.0
"""Seconds in which the Hub must answer once before anything is asked of it: its library tries for much
longer."""
UNFINISHED = "unfinished"
"""Ending of the mark of a download that is under way or was interrupted."""
PATIENCE_S = 30.0
"""Seconds that other local ranks wait for a download to begin."""


def directory(name: str, part: Part, shown: str = "") -> str:
    """The directory of a model: `name`, or for org/name that of its files in the Hub's cache, fetched if they
    are not there.

    A name whose first part is a directory here is a path, unless the cache has it.

    Args:
        shown: what a message begins with; default: the name.

    Raises:
        ConfigError: the repository cannot be fetched.
    """
    if not is_repository_id(name):
        return name
    if (path := cached(name, part)) is not None and not _is_unfinished(name):
        return str(path)
    if path is None and Path(name).parent.is_dir():
        return name
    return str(_fetched(name, part, shown or name))


def with_directories(options: dict[str, Any], *, weights: bool) -> dict[str, Any]:
    """Return the options that name models with directories in place of ids.

    The weights come first: they and model.from_hf are then of one revision.

    Args:
        weights: fetch those of model.init_from, which else is left alone, and those of a second model, of
            which else the shape is enough.
    """
    directories: dict[str, Any] = {}
    for name in ("model.init_from", *SECOND_MODELS):
        model = options.get(name)
        if model is not None and model.startswith("hf:") and (weights or name in SECOND_MODELS):
            part: Part = "weights" if weights else "shape"
            directories[name] = f"hf:{directory(model.removeprefix('hf:'), part, f'{name} = {model}')}"
    if (shape := options.get("model.from_hf")) is not None:
        directories["model.from_hf"] = directory(
            shape.removeprefix("hf:"), "shape", f"model.from_hf = {shape}"
        )
    return directories


def repository(directory: str) -> str:
    """org/name of a directory in the Hub's cache; any other directory as it is."""
    place = Path(directory)
    if place.parent.name != "snapshots" or not place.parents[1].name.startswith("models--"):
        return directory
    return place.parents[1].name.removeprefix("models--").replace("--", "/", 1)


def cached(name: str, part: Part) -> Path | None:
    """The directory of a repository in the cache if it has all files of the part, else None."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for file in ("config.json", *TOKENIZERS):
        if isinstance(place := try_to_load_from_cache(name, file), str):
            return Path(place).parent if _complete(Path(place).parent, part) else None
    return None


def _complete(place: Path, part: Part) -> bool:
    if part == "tokenizer":
        return any((place / file).is_file() for file in TOKENIZERS)
    if not (place / "config.json").is_file():
        return False
    return part == "shape" or (place / WEIGHTS[0]).is_file() or _has_shards(place / WEIGHTS[1])


def _has_shards(index: Path) -> bool:
    """Whether all files of an index are there; a damaged index is reported where it is read."""
    if not index.is_file():
        return False
    with suppress(ValueError, KeyError, AttributeError):
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((index.parent / file).is_file() for file in files)
    return True


def _note(name: str, ending: str) -> Path:
    """A file of ours about a repository, in the Hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / ".locks" / f"megalite--{name.replace('/', '--')}.{ending}"


def _is_unfinished(name: str) -> bool:
    """Whether a download of a repository is under way, or was interrupted and can be resumed: single files of
    it look complete."""
    return _note(name, UNFINISHED).exists() and online()


def _fetched(name: str, part: Part, shown: str) -> Path:
    """Fetch a repository, or wait until local rank 0 has.

    Args:
        shown: what messages begin with.

    Raises:
        ConfigError: the repository cannot be fetched.
    """
    try:
        from filelock import FileLock

        lock, unfinished = _note(name, "lock"), _note(name, UNFINISHED)
    except ImportError:
        raise ConfigError(
            f"{shown} is not a local directory, and downloading a model from the Hugging Face Hub requires a "
            "package: pip install "
            "huggingface_hub."
        ) from None
    with suppress(OSError):  # the download itself says what is wrong with the cache
        lock.parent.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        _await(name, part, lock)
    elif online():
        with FileLock(lock):
            if cached(name, part) is None or unfinished.exists():  # another run may have fetched it meanwhile
                unfinished.touch()
                _download(name, part, shown)
                unfinished.unlink(missing_ok=True)
    if (path := cached(name, part)) is not None:
        return path
    raise ConfigError(f"{shown} {_missing(name, part)} {_way_out(name)}")


def _download(name: str, part: Part, shown: str) -> None:
    from huggingface_hub import snapshot_download

    print(f"fetching {name} from the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        snapshot_download(name, allow_patterns=list(PATTERNS[part]), ignore_patterns=list(FOLDERS))
    except Exception as error:  # the library raises OSError, ValueError and those of its HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{shown} is not a local directory and could not be downloaded from the Hugging Face Hub: "
            f"{reason}. "
            "Check the name; a gated or private model requires `hf auth login` first."
        ) from None


def _await(name: str, part: Part, lock: Path) -> None:
    """Wait until the files are complete, or nobody has been fetching them for a while."""
    from filelock import FileLock, Timeout

    end = time.monotonic() + PATIENCE_S
    while (cached(name, part) is None or _is_unfinished(name)) and time.monotonic() < end:
        try:
            with FileLock(lock, timeout=0):
                pass
        except Timeout:
            end = time.monotonic() + PATIENCE_S
        time.sleep(0.5)


def _missing(name: str, part: Part) -> str:
    if cached(name, "shape") is None:
        state = "is neither a directory here nor in the cache of the Hugging Face Hub"
    else:
        state = (
            "is in the cache of the Hugging Face Hub without its "
            f"{'weights in safetensors' if part == 'weights' else part}"
        )
    return f"{state}." if online() else f"{state}, and the Hub cannot be reached{_reason()}."


def _reason() -> str:
    """Why the Hub cannot be reached, as far as the environment says it."""
    if _is_offline():
        return " (HF_HUB_OFFLINE is set)"
    endpoint = os.environ.get("HF_ENDPOINT")
    return f" (HF_ENDPOINT = {endpoint})" if endpoint else ""


def _way_out(name: str) -> str:
    if online():
        return "Check the name and the files of the repository, or give a directory."
    return f"Where there is a network: hf download {name} (the cache is in HF_HOME); or give a directory."


def _is_offline() -> bool:
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


@cache
def online() -> bool:
    """Whether the Hub answers within PROBE_S seconds, through the proxies of the environment;
    HF_HUB_OFFLINE=1 says no."""
    if _is_offline():
        return False
    answered = Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(
                os.environ.get("HF_ENDPOINT") or "https://huggingface.co", method="HEAD"
            )
            urllib.request.urlopen(request, timeout=PROBE_S).close()
            answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError) as error:
            # a certificate that another library may know
            if isinstance(getattr(error, "reason", None), ssl.SSLError):
                answered.set()

    asking = Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    asking.start()
    asking.join(PROBE_S)
    return answered.is_set()


def stay_offline() -> None:
    """Let the Hub's libraries use their caches alone: without a network they would try for half a minute, and
    fail."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    # it has read the variables already
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
