"""Ten of the losses of `python -m tests.support.faults.lost_ranks`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.support.configs import write_tokens
from tests.support.faults.lost_ranks import TOKENS, Loss, lose

LOSSES = [
    Loss("dp", 1, "SIGKILL", 3, held=False, silent=False),
    Loss("dp", 0, "SIGKILL", 14, held=True, silent=True),
    Loss("pp", 2, "SIGKILL", 22, held=False, silent=True),
    Loss("pp", 0, "SIGKILL", 9, held=True, silent=False),
    Loss("dp", 2, "SIGSTOP", 11, held=False, silent=True),
    Loss("dp", 0, "SIGSTOP", 6, held=True, silent=True),
    Loss("pp", 1, "SIGSTOP", 17, held=False, silent=True),
    Loss("pp", 0, "SIGSTOP", 30, held=True, silent=True),
    Loss("dp", 1, "hang", 5, held=True, silent=True),
    Loss("pp", 2, "hang", 13, held=False, silent=True),
]


TOGETHER = 4  # they wait most of their time


def test_a_lost_rank_is_named_by_all_others(tmp_path):
    prefix = write_tokens(tmp_path, TOKENS)
    places = [tmp_path / str(number) for number in range(len(LOSSES))]
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(TOGETHER) as pool:
        for line in pool.map(lose, LOSSES, [prefix] * len(LOSSES), places):
            print(line)
