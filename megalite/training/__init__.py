"""The trainer, evaluation, metrics and the console."""
