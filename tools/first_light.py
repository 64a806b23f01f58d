"""`megalite first-light` from a checkout: python tools/first_light.py --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from megalite.commands.start import start

if __name__ == "__main__":
    start("first-light")
