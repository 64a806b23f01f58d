"""Continuing texts with a trained model: language_model.py is where to start; cache, sampling, chat and reply texts have a file each.

sources.py opens a checkpoint, a run or hf:DIR. May import megalite.launch, huggingface, build and what is below.
"""
