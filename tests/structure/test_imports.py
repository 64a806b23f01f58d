"""Imports are cheap: few modules, nothing heavy before its first use, no Triton, no clash over the name `kernels`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megalite.data.preparation.writer import IndexedWriter
from tests.structure.sources import ROOT, python

OWN = {"pretrain", "megalite", "megalite_kernels", "tools"}
# jsonargparse imports the last two where they are installed
OTHERS = {"jsonargparse", "yaml", "_yaml", "numpy", "attr", "attrs"}
MOST_OTHERS = 100  # modules of other packages; importing torch alone takes more than a thousand
EXTRAS = [
    *("triton", "transformers", "datasets", "sentencepiece", "pyarrow", "matplotlib"),
    *("tensorboard", "wandb", "mlflow", "trackio", "lm_eval", "ray"),
]
NEVER_WHILE_TRAINING = [
    *("transformers", "datasets", "sentencepiece", "matplotlib", "triton", "torch._dynamo", "torch.optim"),
    *("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.utils.checkpoint"),
]
ONE_STEP = """
import json, sys
import torch
before = set(sys.modules)
from megalite.config.load import load_config
from megalite.assembly import parts as build
from megalite.training.fit import fit
from megalite.training.trainer import Trainer
config = load_config(["--data.train", sys.argv[1], "--run.dir", sys.argv[2], "--model.preset", "tiny"], world_size=1)
result = Trainer(config, build.make_mesh(config), "cpu").step()
print(json.dumps({"torch": len(before), "modules": sorted(set(sys.modules) - before), "loss": result.loss}))
"""
EVERY_MODULE = """
import importlib, pkgutil, sys
import megalite, megalite_kernels, tools
for package in (megalite, megalite_kernels, tools):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("_triton"):  # imported by the first tensor that a kernel takes
            importlib.import_module(module.name)
"""
WITHOUT = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""
DUMMY_KERNELS = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    anything = {"__init__": lambda self, *args, **options: None, "__call__": lambda self, decorated: decorated}
    return type(name, (), anything)
"""


@pytest.fixture(scope="module")
def first_step(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The modules that a process has imported beyond torch's after one training step."""
    directory = tmp_path_factory.mktemp("tokens")
    with IndexedWriter(directory / "tokens", 257) as writer:
        writer.add(np.arange(10_000) % 257, [10_000])
        writer.finish({"vocab_size": 257, "eos": 256, "tokenizer": "byte"})
    return json.loads(python(ONE_STEP, str(directory / "tokens"), str(directory)).splitlines()[-1])


def test_training_imports_few_packages_beside_torch(first_step):
    """Counted in modules beyond those that torch imports; `import_cost.py` measures the project's own in seconds."""
    packages = Counter(module.partition(".")[0] for module in first_step["modules"])
    others = {name: packages[name] for name in packages.keys() & OTHERS}
    unexpected = {name for name in packages.keys() - OWN - OTHERS - sys.stdlib_module_names if "cython" not in name}
    assert not unexpected, "a package that training did not need before"
    assert sum(others.values()) <= MOST_OTHERS, others
    assert first_step["torch"] > 1000


@pytest.mark.parametrize("module", NEVER_WHILE_TRAINING)
def test_nothing_heavy_is_imported_while_training(first_step, module: str):
    imported = set(first_step["modules"])
    assert {"megalite.training.trainer", "megalite.optimizer.adamw", "jsonargparse"} <= imported  # it has trained
    assert module not in imported


def test_everything_imports_without_triton_and_the_packages_of_extras():
    python(WITHOUT + EVERY_MODULE, *EXTRAS)
    hidden = python(WITHOUT + "try:\n    import triton\nexcept ImportError:\n    print('hidden')", "triton")
    assert hidden == "hidden\n"


def test_a_distribution_called_kernels_does_not_clash(tmp_path: Path):
    """transformers imports that distribution if it is installed; our directory of the same name must not hide it."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(DUMMY_KERNELS)
    information = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (information / "RECORD").write_text("kernels/__init__.py,,\n")
    (information / "top_level.txt").write_text("kernels\n")
    code = """
import kernels
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
print(kernels.__file__, is_kernels_available(), megalite_kernels.__file__)
"""
    theirs, available, ours = python(EVERY_MODULE + code, first_on_path=tmp_path, cwd=ROOT).split()
    assert (theirs, available) == (str(tmp_path / "kernels" / "__init__.py"), "True")
    assert Path(ours) == ROOT / "kernels" / "megalite_kernels" / "__init__.py"
