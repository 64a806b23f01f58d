"""Runs whose numbers a change of the code must keep to the last bit, recorded by one tree and compared with those of
another.

    python -m tests.recorded record --tree OLD --output old.json --runs old-runs
    python -m tests.recorded record --tree NEW --output new.json --resume old-runs
    python -m tests.recorded compare old.json new.json

It takes nothing from a tree but what stays: the command lines of pretrain.py and tools/, metrics.jsonl and checkpoints
of format 1. The bits depend on the processor, on PyTorch and on its libraries, so recordings are compared on the
machine that made them and not kept here.
"""
