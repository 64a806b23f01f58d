"""The transformer, written once: a model family is a set of `ModelConfig` values.

Start with layer.py, then blocks/attention/block.py, blocks/feed_forward/block.py and stage.py (a pipeline
stage). block_kind.py lists the questions that a kind of block answers, kinds.py the kinds. parameters.py
lists the stored parameters, and cost/ counts the cost of a unit (both without torch). May import
megalite.parallel, the kernels and what is below.
"""
