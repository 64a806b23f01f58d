"""Text generation with a trained model: start at language_model.py; cache, sampling, chat and reply texts
have a file each.

sources.py opens a checkpoint, a run or hf:DIR. May import megalite.launch, huggingface, build and what is
below.
"""
