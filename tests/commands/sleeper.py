"""A process that says something, and sleeps or fails."""

import json
import sys
import time
from pathlib import Path

from benchmarks.report import ROW

spec = json.loads(Path(sys.argv[1]).read_text())
time.sleep(spec.get("seconds", 0))
print(ROW + json.dumps({"said": spec["fails"]}), flush=True)
sys.exit(spec["fails"])
