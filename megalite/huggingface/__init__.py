"""Hugging Face models in and out: names.py maps tensors, convert.py weights and checkpoints, adapters.py LoRA adapters as PEFT has them.

May import megalite.build, checkpoint, model and what is below. Imports transformers nowhere: its files are read and written directly.
"""
