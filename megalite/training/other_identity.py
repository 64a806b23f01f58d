"""What identifies the second model of a run, or one that was asked once: its checkpoints keep it.

A directory of a run, of Hugging Face files or of scores may have other weights when the run resumes, which
would go on with another model under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megalite.assembly.teacher import second_model
from megalite.checkpoint import CheckpointError, find
from megalite.checkpoint.agreement import on_rank_0
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.config.sections.preference import SCORES
from megalite.huggingface.source import HF
from megalite.huggingface.weights_identity import weights_identity
from megalite.mesh.mesh import Mesh

STATE = "second_model"
"""Key of an identity in the state of a checkpoint."""


@dataclass(frozen=True)
class OtherIdentity:
    """Identity of a model besides the one that is trained.

    Attributes:
        option, name: the option that names it, and its value.
        model: the checkpoint's directory, hf:DIR, or what was asked once, in words.
        content: a hash of its weights, and what else determines what it was asked.
    """

    option: str
    name: str
    model: str
    content: str

    def state(self) -> dict[str, str]:
        """Return what a checkpoint keeps."""
        return asdict(self)

    def check(self, state: Mapping[str, Any], directory: object) -> None:
        """Raise ConfigError if a run that resumes has another model under the same name.

        Args:
            state: of the checkpoint. One that names it otherwise may have another model.
            directory: of the checkpoint, for the message.
        """
        before = state.get(STATE)
        if before is None or any(before[key] != getattr(self, key) for key in ("option", "name")):
            return
        if before["content"] == self.content:
            return
        was, same = before["model"], before["model"] == self.model
        restore = f"set {self.option} to {was} while it exists"
        if self.name.startswith(SCORES):
            restore = "score the data with that model again"
        elif same:
            restore = "restore its files"
        raise ConfigError(
            f"{self.option} = {self.name} is another model than at checkpoint.load={directory}: it was {was}"
            f"{', with other weights' if same else f', and is {self.model}'}. To go on with the model of "
            f"before, {restore}; to go on with another one, name it by another path"
            f"{' and set checkpoint.allow=[objective]' if self.option == 'preference.reference' else ''}."
        )


def resolved(config: Config, mesh: Mesh) -> tuple[Config, OtherIdentity]:
    """Return a configuration that names the newest checkpoint in place of a run as the second model, and the
    identity of the model. Collective: rank 0 looks.

    Raises:
        ConfigError: there is no such model.
    """
    named = second_model(config)
    assert named is not None, "the run has a second model"
    option, name = named

    def look() -> tuple[str, str]:
        model = name if name.startswith(HF) else str(find(Path(name)))
        return model, weights_identity(model)

    try:
        model, content = on_rank_0(mesh, look)
    except CheckpointError as error:
        raise ConfigError(f"{option} = {name}: {error}") from None
    section, field = option.split(".")
    config = replace(config, **{section: replace(getattr(config, section), **{field: model})})
    return config, OtherIdentity(option, name, model, content)


class Stored:
    """A model that was asked once. It runs no pass before a step."""

    def __init__(self, identity: OtherIdentity):
        self.identity = identity

    def run(self, microbatches: object) -> None:
        """Do nothing: the rows have its answers."""
