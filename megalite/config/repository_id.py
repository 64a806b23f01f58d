"""Names of repositories on the Hugging Face Hub: org/name."""

import re
from pathlib import Path

ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))[A-Za-z0-9](?:[\w.-]*\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
SECOND_MODELS = ("distillation.teacher", "preference.reference")
OF_HUB = ("model.init_from", "model.from_hf", *SECOND_MODELS)
"""Options that may name a model of the Hub."""
FILE_ENDINGS = (".model", ".json", ".yaml", ".yml")


def is_repository_id(name: str) -> bool:
    """Return whether a name has the form org/name and is neither a file name nor an existing path."""
    return ID.fullmatch(name) is not None and not name.endswith(FILE_ENDINGS) and not Path(name).exists()
