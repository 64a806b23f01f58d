"""`megalite launch` from a checkout: python tools/launch.py --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from megalite.commands.start import start

if __name__ == "__main__":
    start("launch")
