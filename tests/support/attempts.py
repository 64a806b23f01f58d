"""The command line of programs that try random cases: `--count` of them, drawn with `--seed`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


def options(description: str | None, count: int) -> argparse.Namespace:
    """`count` and `seed` of the command line. count: the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make(attempts: Iterable[Callable[[], str]], what: str) -> NoReturn:
    """Print what each attempt returns, or why it failed (AssertionError), then how many did `what`; exit with status 1
    if any failed."""
    made = failed = 0
    for made, attempt in enumerate(attempts, start=1):
        try:
            print(f"{made:3} {attempt()}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{made:3} FAILED {error}", flush=True)
    print(f"{made - failed} of {made} {what}")
    sys.exit(int(failed > 0))
