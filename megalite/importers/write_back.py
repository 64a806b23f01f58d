"""A layout of ours in the keys of an imported file: which keys to change, and what no key expresses.

A change of a key is tried by importing the changed file: what this module returns imports to the wanted
options.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.importers.convert import Imported, leaves_of
from megalite.importers.projects import PROJECTS
from megalite.importers.verdict import ImportedFile, plain, row_of

REMOVED = None
"""The value of a key to remove from the file."""
WORDS = {
    "parallel.schedule": (
        *("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "gpipe", "1f1b"),
    ),
    "parallel.zero": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "zero3", "optim", "optim_grads", "no_shard"),
    "train.recompute": ("full", "selective", "none", "uniform", "True", "False", "op"),
    "parallel.offload": ("cpu", "none", "nvme"),
}
"""Further values to try for an option: notations of projects."""
RANKS, BATCH, MICRO = "parallel.dp", "train.global_batch_size", "train.micro_batch_size"
MOST_EXTENDED = 6  # sets of changes that are extended by one key


@dataclass
class WrittenBack:
    """Changes of a file that lead to wanted options.

    Attributes:
        keys: key → its new value, or REMOVED.
        unexpressed: wanted options that no change of a key leads to.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    unexpressed: list[str] = field(default_factory=list)


class WriteBack:
    """Writes layouts back into a file.

    Args:
        tree: content of the file.
        convert: imports a content as the file was imported, but for other data-parallel ranks where the file
            does not say how many.
        dp: of the file.
        project: the name of its project in PROJECTS.
    """

    def __init__(self, tree: Any, convert: Callable[[Any, int], Imported], project: str, dp: int):
        self._tree, self._convert = tree, convert
        self._start = convert(tree, dp)
        self._leaves = leaves_of(tree)
        self._module = module = PROJECTS[project]
        source = ImportedFile({key: plain(value) for key, value in self._leaves.items() if value is not None})
        self._source = source = replace(source, dp=self._start.dp)
        self._keys: dict[str, list[str]] = {}  # option → keys, those of the file first
        for key, options in self._start.honoured.items():
            for option in options:
                self._keys.setdefault(option, []).append(key)
        for key, row in module.table(source).items():
            known = self._keys.setdefault(row.option, []) if row.option and "*" not in key else [key]
            if key not in known:
                known.append(key)

    @property
    def expressible(self) -> Collection[str]:
        """The options that keys of the project set."""
        return self._keys.keys()

    def start_values(self, options: Collection[str]) -> dict[str, Any]:
        """Return the values of options that the file leads to as it is."""
        return {option: value_of(self._start, option) for option in options}

    def changes(self, wanted: Mapping[str, Any]) -> WrittenBack:
        """Return the changes that lead to the wanted options, or to most of them.

        Other options may change with a key, by the rules of the file's project. Sets of changes are extended
        by one key, first those that leave the fewest options, since another key may have to correct what one
        does: a micro-batch size changes the batch.
        """
        start = self._convert(self._tree, wanted.get(RANKS, self._start.dp))
        without = [option for option in _missing(start, wanted) if option not in {RANKS, *self._keys}]
        wanted = {option: value for option, value in wanted.items() if option not in without}
        best = WrittenBack({}, _missing(start, wanted))
        number, queue, seen = count(), [(0, 0, 0, best, self._tree)], {str({})}
        for _ in range(MOST_EXTENDED):
            if not best.unexpressed or not queue:
                break
            *_, current, tree = heapq.heappop(queue)
            for left, key, value in self._tried(tree, current.unexpressed, wanted):
                extended = WrittenBack({**current.keys, key: value}, left)
                known = str(sorted(extended.keys.items()))
                if known in seen or len(left) > len(current.unexpressed):
                    continue
                seen.add(known)
                removed = sum(each is REMOVED for each in extended.keys.values())
                rank = len(left), len(extended.keys) + removed
                heapq.heappush(queue, (*rank, next(number), extended, _with(tree, key, value)))
                if len(left) < len(best.unexpressed):
                    best = extended
        return WrittenBack(best.keys, best.unexpressed + without)

    def _tried(
        self, tree: Any, missing: list[str], wanted: Mapping[str, Any]
    ) -> Iterator[tuple[list[str], str, Any]]:
        """Yield the options still missing after a change of one key, the key and its value."""
        for key, value in self._promising(leaves_of(tree), missing, wanted):
            try:
                state = self._convert(_with(tree, key, value), wanted.get(RANKS, self._start.dp))
            except (ConfigError, TypeError, ValueError):
                continue
            yield _missing(state, wanted), key, value

    def _promising(
        self, leaves: Mapping[str, Any], missing: list[str], wanted: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield keys with values whose rows set a missing option as wanted, and keys to remove.

        Importing takes much longer than asking a row.
        """
        known = {key: plain(value) for key, value in leaves.items() if value is not None}
        for option in missing:
            for key in self._keys.get(option, []) if option != RANKS else ():
                for value in _values(option, wanted, leaves.get(key)):
                    source = replace(
                        self._source, leaves=known | {key: value}, dp=wanted.get(RANKS, self._start.dp)
                    )
                    try:
                        row = row_of(self._module.table(source), key)
                        set_here = {} if row is None else row.judge(value, source).options
                    except (ConfigError, TypeError, ValueError, AttributeError):
                        continue
                    if option in set_here and set_here[option] == wanted[option]:
                        yield key, value
                if leaves.get(key) is not None:
                    yield key, REMOVED
        before = self._start.dp
        if RANKS in missing and before:  # a key of the ranks sets no option, or several do together
            table = self._module.table(self._source)
            for key, value in known.items():
                row = row_of(table, key)
                of_layout = row is not None and (row.option is None or row.option.startswith("parallel."))
                if of_layout and type(value) is int and value > 0 and value * wanted[RANKS] % before == 0:
                    yield key, value * wanted[RANKS] // before


def _missing(state: Imported, wanted: Mapping[str, Any]) -> list[str]:
    """Return the wanted options that a file does not lead to."""
    return [option for option, value in wanted.items() if value_of(state, option) != value]


def value_of(state: Imported, option: str) -> Any:
    """Return an option of an imported file, or its default."""
    if option == RANKS:
        return state.dp
    return state.options.get(option, attrgetter(option)(Config()))


def _values(option: str, wanted: Mapping[str, Any], current: Any) -> Iterator[Any]:
    """Yield the values to try for a key, without its current one."""
    seen, further = [current], WORDS.get(option, ())
    if option == BATCH and RANKS in wanted and MICRO in wanted:
        further = (wanted[BATCH] // (wanted[MICRO] * wanted[RANKS]),)  # accumulation steps
    for value in (wanted[option], True, False, 1, 2, *further):
        if not any(value is each or (value == each and type(value) is type(each)) for each in seen):
            seen.append(value)
            yield value


def _with(tree: Any, key: str, value: Any) -> Any:
    """Return the content with another value of a key, section.key."""
    changed = deepcopy(tree)
    section, rest = changed, key
    while True:
        name, dot, after = rest.partition(".")
        if rest in section or not dot:  # a key may have dots of its own
            if value is REMOVED:
                section.pop(rest, None)
            else:
                section[rest] = value
            return changed
        section, rest = section.setdefault(name, {}), after
