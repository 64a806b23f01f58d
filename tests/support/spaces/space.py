"""A space of layouts and models: each of its cases must train as on one process. What runs of it are a table and
samples.

A case is a dict of option values. The table has every legal pair of option values, in few cases (tables/NAME.txt, which
covering.py searches); a sample has random cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Configs = tuple[dict[str, Any], dict[str, Any]]
TABLES, RECORDS = Path(__file__).with_name("tables"), Path(__file__).parents[2] / "distributed" / "pairs"


@dataclass(frozen=True)
class Space:
    """Options with their values, and the combinations of them that can run.

    Attributes:
        options: values of each option, the plainest first.
        is_legal: whether a case can run; it reads the options `bound`, all others combine freely. model: what a run on
        one process depends on, among the keys of a complete case. complete: a case with the other sizes that follow
        from it, as `configs.config_of` takes them. configs: the configuration of a case with the token file of a
        prefix, and that of the same model and data on one process. named: cases that the table begins with.
    """

    name: str
    options: dict[str, tuple[Any, ...]]
    bound: tuple[str, ...]
    is_legal: Callable[[Case], bool]
    model: tuple[str, ...]
    complete: Callable[[Case], Case]
    configs: Callable[[Case, str], Configs]
    named: tuple[Case, ...] = ()

    def pairs_of(self, case: Case) -> set[Pair]:
        return set(self.pairs_with(case, self.options))

    def pairs_with(self, case: Case, changed: Iterable[str]) -> list[Pair]:
        """The pairs of a case in which one of some options is."""
        chosen = set(changed)
        return [((a, case[a]), (b, case[b])) for a, b in combinations(self.options, 2) if a in chosen or b in chosen]

    def legal_pairs(self) -> set[Pair]:
        """The pairs of option values that some legal case has."""
        legal = [
            case
            for case in self._products([option for option in self.options if option in self.bound])
            if self.is_legal(case)
        ]
        pairs = {pair for case in legal for pair in combinations(case.items(), 2)}
        values = {
            option: {case[option] for case in legal} if option in self.bound else set(all)
            for option, all in self.options.items()
        }
        for one, other in combinations(self.options, 2):
            if one not in self.bound or other not in self.bound:
                pairs |= {((one, a), (other, b)) for a, b in product(values[one], values[other])}
        return pairs

    def _products(self, options: Iterable[str]) -> Iterator[Case]:
        names = list(options)
        for values in product(*(self.options[name] for name in names)):
            yield dict(zip(names, values, strict=True))

    def draw(self, random: Random) -> Case:
        """A random legal case."""
        while not self.is_legal(case := {option: random.choice(values) for option, values in self.options.items()}):
            pass
        return case

    def sample(self, number: int) -> list[Case]:
        """Distinct cases in random order, always the same ones: any beginning of them is a sample of the whole
        space."""
        random, cases = Random(0), dict[tuple[Any, ...], Case]()
        while len(cases) < number:
            case = self.draw(random)
            cases.setdefault(tuple(case.values()), case)
        return list(cases.values())

    def plain(self, **changed: Any) -> Case:
        """The first value of each option, with some changes, which may add keys of a complete case."""
        return {option: values[0] for option, values in self.options.items()} | changed

    def label(self, case: Case) -> str:
        """The values of a case: numbers with their option, options that are set, and words that are not none."""
        words = []
        for option in self.options:
            value = case[option]
            if isinstance(value, bool):
                words += [option] if value else []
            elif isinstance(value, int | float):
                words.append(f"{option}{value}")
            elif value not in (None, "none"):
                words.append(value)
        return "-".join(words)

    # ---- the table

    @property
    def file(self) -> Path:
        return TABLES / f"{self.name}.txt"

    def table(self) -> list[Case]:
        """Cases in which every legal pair occurs. An option without a column has its first value."""
        header, *rows = (line.split() for line in self.file.read_text().splitlines())
        values = {option: {str(value): value for value in self.options[option]} for option in header}
        return [
            self.plain(**{option: values[option][word] for option, word in zip(header, row, strict=True)})
            for row in rows
        ]

    def write(self, cases: Sequence[Case]) -> None:
        """Write the table, and add its pairs to the record."""
        rows = [list(self.options), *([str(case[option]) for option in self.options] for case in cases)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        self.file.write_text("".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows))
        known = self.recorded() | self.covered(cases)
        words = [f"{option}={value}" for option, values in self.options.items() for value in values]
        columns = {
            one: [other for other in words[index:] if frozenset((one, other)) in known]
            for index, one in enumerate(words)
        }
        self.record.write_text("".join(f"{one}: {' '.join(others)}\n" for one, others in columns.items() if others))

    # ---- the record of pairs that its table has had

    @property
    def record(self) -> Path:
        """A line for each option value, `tp=1: pp=1 pp=2 …`, with the values of later options beside which a case has
        had it."""
        return RECORDS / f"{self.name}.txt"

    def recorded(self) -> set[frozenset[str]]:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        entries = (line.split(": ") for line in lines)
        return {frozenset((one, other)) for one, others in entries for other in others.split()}

    def covered(self, cases: Iterable[Case]) -> set[frozenset[str]]:
        pairs = {pair for case in cases for pair in self.pairs_of(case)}
        return {frozenset(f"{option}={value}" for option, value in pair) for pair in pairs}


def world(case: Case) -> int:
    """The number of ranks of a complete case."""
    return int(case["tp"] * case["pp"] * case["dp"] * case.get("cp", 1))
