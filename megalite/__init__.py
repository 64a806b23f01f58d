"""megalite: 3D-parallel pretraining of GPT- and Llama-style language models that proves and predicts itself.

`megalite.{Config, load_config, Mesh, make_mesh, Trainer, fit}` are its public names, each imported when it is
first used; other names may change. Start with commands/train.py and training/trainer.py. Imports run
downwards, in the order that pyproject.toml lists.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.assembly.parts import make_mesh
    from megalite.config.load import load_config
    from megalite.config.schema import Config
    from megalite.mesh.mesh import Mesh
    from megalite.training.fit import fit
    from megalite.training.trainer import Trainer

__version__ = "0.2.0"
__all__ = ["Config", "Mesh", "Trainer", "__version__", "fit", "load_config", "make_mesh"]
_PUBLIC = {
    "Config": "config.schema",
    "Mesh": "mesh.mesh",
    "Trainer": "training.trainer",
    "fit": "training.fit",
    "load_config": "config.load",
    "make_mesh": "assembly.parts",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
