"""The phases of a run in one process, for `benchmarks.costs`.

Prints the processor seconds of each phase as JSON. Runs on any tree of megalite.

python FILE OPTIONS…: the options are those of `megalite train`; the run directory must be new.
"""

from __future__ import annotations

import json
import sys
from time import process_time

phases: dict[str, float] = {}
last = [0.0]


def done(phase: str) -> None:
    """Assign the processor time since the last phase to this one."""
    now = process_time()
    phases[phase], last[0] = now - last[0], now


done("python")
import torch  # noqa: E402

done("import torch")
from megalite.assembly import parts as build  # noqa: E402
from megalite.commands import train  # noqa: E402, F401
from megalite.config.load import load_config  # noqa: E402
from megalite.launch.process import configure_process  # noqa: E402
from megalite.training.fit import fit  # noqa: E402, F401
from megalite.training.matmul_choice import choose  # noqa: E402
from megalite.training.trainer import Trainer  # noqa: E402

done("import megalite")
config = load_config(sys.argv[1:], world_size=1)
done("configuration")
device = torch.device("cpu")
configure_process(device)
mesh = build.make_mesh(config)
done("mesh")
choose(config, mesh, device)
done("choice of products")
trainer = Trainer(config, mesh, device)
done("trainer")
trainer.step()
done("first step")
trainer.step()
done("second step")
trainer.save()
done("first save")
trainer.step()
done("third step")
trainer.save()
done("second save")
trainer.close()
again = Trainer(config, mesh, device)  # resumes
assert again.step_done == 3
done("trainer with load")
print(json.dumps(phases))
sys.stdout.flush()
