"""The space of layouts and models over which a run must equal one process, and a pairwise table of it.

A case is a dict of option values, with the number of layers that follows from them. `pairwise()` gives a small list of legal cases in which
every legal pair of option values occurs; `every_case()` walks the whole space.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from random import Random
from typing import Any

from megalite.parallel.pipeline.generator import chunks_of

Case = dict[str, Any]

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 3, 4),
    "schedule": ("1f1b", "gpipe", "interleaved-2", "interleaved-3", "zb-h1", "zb-h2", "zb-v", "v-half"),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "cpu", "disk"),
    "sequence_parallel": (False, True),
    "microbatches": (1, 2, 8),
    "recompute": ("none", "selective", "full", "every-2"),
    "tied": (False, True),
    "kv_heads": (4, 1),
    "vocab_size": (96, 101),
    "uneven": (False, True),  # one layer more than stages
    "masked": (False, True),
    "dropout": (0.0, 0.1),
    "precision": ("fp64", "fp32"),
}
PLACE = {option: number for number, option in enumerate(OPTIONS)}
DEAR = ("tp", "pp", "dp", "offload", "recompute", "uneven", "microbatches")  # their values are listed from cheap to expensive
SEED, CANDIDATES = 7, 30
MAX_WORLD = 8
FEWEST_LAYERS = 3


def schedule_options(schedule: str) -> tuple[str, int | None]:
    """parallel.schedule and parallel.virtual_stages: `interleaved-3` is interleaved with three stages per rank."""
    name, _, chunks = schedule.partition("interleaved-")
    return ("interleaved", int(chunks)) if chunks else (name, None)


def stages(case: Case) -> int:
    """The number of pipeline stages over all ranks."""
    return int(case["pp"] * chunks_of(*schedule_options(case["schedule"])))


def with_layers(case: Case) -> Case:
    """The case with the smallest number of layers that its stages need, because every layer costs time."""
    return {**case, "layers": max(stages(case), FEWEST_LAYERS) + case["uneven"]}


def is_legal(case: Case) -> bool:
    """Whether a (possibly partial) case can run here: at most 8 ranks, sequence parallelism only with tp."""
    sequence_parallel = case.get("sequence_parallel", False)
    tp = case.get("tp", 2 if sequence_parallel else 1)
    return tp * case.get("pp", 1) * case.get("dp", 1) <= MAX_WORLD and not (sequence_parallel and tp == 1)


def global_batch(case: Case) -> int:
    return 24 if case["dp"] == 3 else 32


def micro_batch(case: Case) -> int:
    return global_batch(case) // (case["dp"] * case["microbatches"])


def name(case: Case) -> str:
    flags = [f"tp{case['tp']}", f"pp{case['pp']}", f"dp{case['dp']}", case["schedule"], f"zero{case['zero']}", f"m{case['microbatches']}"]
    flags += [case["offload"]] if case["offload"] != "none" else []
    flags += ["sp"] if case["sequence_parallel"] else []
    flags += [case["recompute"], f"kv{case['kv_heads']}", f"v{case['vocab_size']}", f"l{case['layers']}"]
    return "-".join([*flags, *(flag for flag in ("tied", "masked", "dropout") if case[flag]), case["precision"]])


def every_case() -> Iterator[Case]:
    for values in product(*OPTIONS.values()):
        case = dict(zip(OPTIONS, values, strict=True))
        if is_legal(case) and global_batch(case) % (case["dp"] * case["microbatches"]) == 0:
            yield with_layers(case)


NAMED = {  # always in the table, under these names
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "schedule": "1f1b",
    "zero": 1,
    "offload": "none",
    "sequence_parallel": True,
    "microbatches": 2,
    "recompute": "none",
    "tied": True,
    "kv_heads": 1,
    "vocab_size": 101,
    "uneven": True,
    "masked": True,
    "dropout": 0.1,
    "precision": "fp64",
}


def legal_pairs() -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    pairs = set()
    for one, other in combinations(OPTIONS, 2):
        for a, b in product(OPTIONS[one], OPTIONS[other]):
            if is_legal({one: a, other: b}):
                pairs.add(((one, a), (other, b)))
    return pairs


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations([(option, case[option]) for option in OPTIONS], 2))


def _pair(one: tuple[str, Any], other: tuple[str, Any]) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return (one, other) if PLACE[one[0]] < PLACE[other[0]] else (other, one)


def cost(case: Case) -> float:
    """Approximate seconds of 20 steps of a case whose ranks share two cores, dominated by waits for messages."""
    layers, passes = with_layers(case)["layers"], 1.4 if case["recompute"] == "full" else 1.0
    seconds = 1 + 0.15 * case["tp"] * case["pp"] * case["dp"] + 0.12 * layers
    each = case["dp"] * case["microbatches"]
    seconds += 0.075 * (case["tp"] - 1) * each * layers * passes + 0.1 * (case["pp"] - 1) * each * stages(case) / case["pp"]
    gathered = 0.09 * (case["dp"] - 1) * case["microbatches"] * layers if case["zero"] == 3 else 0.0
    return float(seconds + gathered + 0.5 * (case["offload"] == "disk"))


def pairwise() -> list[Case]:
    """Greedy cover: among cases grown from uncovered pairs, take the one that covers most per cost. The seed gives a cheap table."""
    random = Random(SEED)
    table = [NAMED, {**NAMED, "precision": "fp32"}]
    missing = legal_pairs().difference(*map(pairs_of, table))
    while missing:
        uncovered = sorted(missing, key=repr)
        grown = [_grown(pair, missing, random) for pair in random.sample(uncovered, min(CANDIDATES, len(uncovered)))]
        best = max(grown, key=lambda case: len(missing & pairs_of(case)) / cost(case))
        missing -= pairs_of(best)
        table.append(best)
    return [with_layers(case) for case in table]


def _grown(pair: tuple[tuple[str, Any], ...], missing: set[Any], random: Random) -> Case:
    """A legal case around a pair: each other option, in random order, gets the value that covers most pairs, the cheapest of equals."""
    case: Case = dict(pair)
    for option in random.sample([option for option in OPTIONS if option not in case], len(OPTIONS) - len(case)):
        values = [value for value in OPTIONS[option] if is_legal({**case, option: value})]
        if option == "microbatches" and case.get("pp", 2) > 1:
            values = [*values[1:], values[0]]  # one microbatch exercises little of a pipeline
        elif option not in DEAR:
            random.shuffle(values)
        gains = [sum(_pair(item, (option, value)) in missing for item in case.items()) for value in values]
        case[option] = values[gains.index(max(gains))]
    return case
