"""Results of one process, with which layouts are compared: each configuration runs once in a run of the suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from tests.support.pool import RankPool

RUN_KEYS = ("dir", "name")  # where a run writes, which changes no number


class References:
    """Runs jobs on one process and caches their results by job, configuration and arguments."""

    def __init__(self, ranks: RankPool):
        self._ranks = ranks
        self._known: dict[bytes, Any] = {}

    def run(self, job: Callable[..., Any], config: dict[str, Any], *args: Any) -> Any:
        """`job(context, config, *args)` on one process. The result is shared: it must not be changed."""
        run = {key: value for key, value in config["run"].items() if key not in RUN_KEYS}
        described = [job.__module__, job.__qualname__, {**config, "run": run}, args]
        key = blake2b(json.dumps(described, sort_keys=True).encode()).digest()
        if key not in self._known:
            self._known[key] = self._ranks.run(1, job, config, *args)[0]
        return self._known[key]
