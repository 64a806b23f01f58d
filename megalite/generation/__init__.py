"""Text generation with a trained model: start at language_model.py; sampling, chat and reply texts have a
file each. What is kept of each row is in megalite.model.row_cache.

sources.py opens a checkpoint, a run or hf:DIR. May import megalite.launch, huggingface, assembly and what is
below.
"""
