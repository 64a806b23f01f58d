"""Pickled files, read without running anything that is in them.

Checkpoints of other programs are pickles, which can name any function. Only functions of torch that build
tensors from bytes are called here. Named classes of the other program become records that keep their
arguments and do nothing (`Inert`); any other name is an error.

    .pt files        torch.load(weights_only=True), with records for the named classes
    .metadata        an unpickler for which every name is a record
"""

from __future__ import annotations

import io
import pickle
import re
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch

from megalite.checkpoint import CheckpointError

ARGUMENTS = "argparse.Namespace"
_RECORDS = re.compile(
    r"megatron\.|transformer_engine\.|apex\.|torch\.distributed\.|types\.SimpleNamespace$|signal\.Signals$"
    r"|pathlib\.\w*Path$|_io\.BytesIO$|numpy\.(ndarray|dtype)$|numpy\._?core\.multiarray\.(_reconstruct|scalar)$"
    r"|numpy\.dtypes?\.\w+$|collections\.(defaultdict|deque)$|torch\._C\.Generator$"
    r"|datetime\.(timedelta|datetime)$|builtins\.(slice|range|frozenset)$"
)
"""Names that become records."""
_METADATA_TYPES = re.compile(
    r"torch\.(Size|serialization\._get_layout|memory_format)$|collections\.OrderedDict$"
)
"""Further names of a .metadata file that become records."""


class PickleError(CheckpointError):
    """Raised for a file that cannot be read without running code, or that is damaged."""


class Inert:
    """An object of another program: its arguments and its state, as they are in the file.

    Attributes:
        global_name: the name of its class.
    """

    global_name = ""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})

    def extend(self, items: Any) -> None:
        """Ignore the elements of a list."""

    def append(self, item: Any) -> None:
        """Ignore an element of a list."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an entry of a mapping."""


@cache
def inert(name: str) -> type[Inert]:
    """Return the class of records for a class of another program, module.Name."""
    return type("Inert", (Inert,), {"global_name": name})


def load_pt(file: Path | IO[bytes], name: str = "") -> Any:
    """Read a file of torch.save.

    Tensors of a path are views of the memory-mapped file.

    Args:
        name: of the file, for messages; default: its path.

    Raises:
        PickleError: it is damaged, or it names something that is neither a tensor nor a known record.
    """
    name = name or str(file)
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:  # torch raises many types for a file that it cannot read
        raise PickleError(f"{name} is not a file of torch.save: {_first_line(error)}") from None
    if unknown := sorted(each for each in needed if each != ARGUMENTS and not _RECORDS.match(each)):
        raise PickleError(_refused(name, unknown[0]))
    records: list[Any] = [(inert(each), each) for each in needed if each != ARGUMENTS]
    if isinstance(file, Path):
        place: dict[str, Any] = {"f": str(file), "mmap": True}
    else:
        file.seek(0)
        place = {"f": file}
    try:
        with torch.serialization.safe_globals([Namespace, *records]):
            return torch.load(**place, map_location="cpu", weights_only=True)
    except Exception as error:
        raise PickleError(f"Could not load {name} with weights_only=True: {_first_line(error)}") from None


def load_metadata(path: Path) -> Any:
    """Read a pickle of metadata, in which every class is a record.

    Raises:
        PickleError: it is damaged, or it names something else.
    """
    try:
        return _MetadataUnpickler(io.BytesIO(path.read_bytes()), str(path)).load()
    except OSError as error:
        raise PickleError(f"Could not read {path}: {error.strerror}") from None
    except PickleError:
        raise
    except Exception as error:
        raise PickleError(f"{path} is damaged: {_first_line(error)}") from None


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], name: str):
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "torch.Size":
            return torch.Size
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if _RECORDS.match(full) or _METADATA_TYPES.match(full):
            return inert(full)
        raise PickleError(_refused(self._name, full))

    def persistent_load(self, pid: Any) -> Any:
        raise PickleError(f"{self._name} is damaged: it refers to the object {pid!r} outside of the file")


def _refused(name: str, unknown: str) -> str:
    return (
        f"{name} contains {unknown}, which is neither a tensor nor a record of Megatron-LM or torch. It was "
        "not loaded, because that could run code. If you trust its source, save it again without this object."
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
