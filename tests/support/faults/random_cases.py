"""The command line of programs that run random cases: `--count` of them, drawn with `--seed`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


def arguments(description: str | None, count: int) -> argparse.Namespace:
    """Parse the command line into `count`, whose default is given, and `seed`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run(cases: Iterable[Callable[[], str]], success: str) -> NoReturn:
    """Print the result of each case, or its AssertionError, and how many succeeded; exit with status 1 if one failed.

    success: the end of the last line, after the number of cases that succeeded.
    """
    count = failed = 0
    for count, case in enumerate(cases, start=1):
        try:
            print(f"{count:3} {case()}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{count:3} FAILED {error}", flush=True)
    print(f"{count - failed} of {count} {success}")
    sys.exit(int(failed > 0))
