"""One rank of a recorded run, started by `verify.run_ranks` with the arguments DIRECTORY and STEPS.

DIRECTORY holds the configuration, config.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megalite.config.load import from_dict
from megalite.launch.process import shutdown
from megalite.training.verify import record


def main() -> None:
    directory = Path(sys.argv[1])
    record(
        from_dict(json.loads((directory / "config.json").read_text(encoding="utf-8"))),
        int(sys.argv[2]),
        directory,
    )
    shutdown()


if __name__ == "__main__":
    main()
