"""The run: its name, directory and seed."""

from dataclasses import dataclass
from pathlib import Path

from megalite.config import amounts
from megalite.config.option import NOT_NEGATIVE, option
from megalite.config.rule import (
    Rule,
    can_be_written,
    duration_rule,
)
from megalite.stores.url import is_url, local, normal


@dataclass
class RunConfig:
    dir: str = option("runs", path=True)
    """Parent directory of the run's own directory, `run.dir/run.name`; or the URL of an object store, such as
    s3://bucket/prefix, to which the run uploads it."""
    name: str = "run"
    """Name of the run. Its configuration, metrics, checkpoints and traces are stored in `run.dir/run.name`.
    """
    seed: int = option(1234, NOT_NEGATIVE)
    """Random seed. Random numbers are keyed by name and step, so every topology draws the same ones."""
    deterministic: bool = False
    """Use only deterministic algorithms, and accumulate the two gradients of a tied embedding separately, to
    add them in a fixed order."""
    timeout: str = option("10m", amount=amounts.DURATION)
    """End the run when a rank does not answer a collective for this long, for example 10m or 1h. Saves and
    loads may take longer."""
    extensions: list[str] | None = option(None, path=True)
    """Python files of yours that register objectives, data sources and observers of steps. null: none."""
    spool: str = option("runs", path=True)
    """Where run.dir is an object store: local directory for the files of the run, which are uploaded from
    there. A fast disk of each node, or a shared one."""
    overwrite: bool = False
    """Let a new run use the directory of an old one (checkpoint.load none or of another run), which is
    renamed to NAME.old-1 first."""

    @property
    def directory(self) -> Path:
        """The run's own directory, in run.spool if run.dir is a store."""
        return Path(self.dir) / self.name if self.url is None else local(self.spool, self.url)

    @property
    def url(self) -> str | None:
        """The run's own place in the store that run.dir names, or None."""
        return f"{normal(self.dir)}/{self.name}" if is_url(self.dir) else None


RULES: tuple[Rule, ...] = (
    Rule(
        "run.name is a directory name",
        "run.name",
        lambda c: c.run.name in ("", ".", "..") or "/" in c.run.name,
        message="is not a valid directory name",
        legal="Choose a name without /; run.dir takes a path.",
    ),
    duration_rule("timeout is a duration", "run.timeout"),
    Rule(
        "the run can be written",
        "run.dir",
        lambda c: c.run.url is None and not can_be_written(c.run.directory),
        message="is not writable, or {run.name} in it",
        legal="Choose a directory that you can write to or create.",
    ),
    Rule(
        "the spool can be written",
        "run.spool",
        lambda c: c.run.url is not None and not can_be_written(c.run.directory),
        message="is not writable, and {run.dir} is uploaded from there",
        legal="Choose a directory that you can write to or create.",
    ),
    Rule(
        "no overwriting in a store",
        "run.overwrite",
        lambda c: c.run.overwrite and c.run.url is not None,
        message="is not supported with {run.dir}, because a store cannot rename the old run",
        legal="Choose another run.name, or delete the old run with the tools of the store.",
    ),
)
