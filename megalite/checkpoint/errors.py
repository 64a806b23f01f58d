"""The error that checkpoints raise."""


class CheckpointError(RuntimeError):
    """A checkpoint can not be written, found or used; the message names the file, what was expected and what was found."""
