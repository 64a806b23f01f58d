"""megalite: 3D-parallel pretraining of GPT- and Llama-style language models that proves and predicts itself."""

__version__ = "0.1.0"
