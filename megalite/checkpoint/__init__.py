"""Topology-independent checkpoints.

Tensors are stored by global name and coordinates, so that any mesh can read what another mesh has written.

Start at api.py: what a checkpoint is, and saving, loading, listing and pruning. manifest.py describes it,
checksummed_chunks.py writes and verifies its bytes. May import megalite.model and what is below; imports
torch only to write or read a checkpoint.
"""

from megalite.checkpoint.api import find, history, latest, load, manifest_of, mark_best, prune, save
from megalite.checkpoint.errors import CheckpointError, DamagedError
from megalite.checkpoint.manifest import Manifest
from megalite.config.run_files import step_name, step_number

__all__ = ["CheckpointError", "DamagedError", "Manifest", "find", "history", "latest", "load", "manifest_of"]
__all__ += ["mark_best", "prune", "save", "step_name", "step_number"]
