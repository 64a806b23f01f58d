"""Import and export of Hugging Face models and of PEFT's LoRA adapters.

tensor_places.py maps tensors, source.py reads a directory, convert.py converts checkpoints,
adapter_import.py and adapter_export.py adapters.

May import megalite.assembly, checkpoint, model and what is below. Does not import transformers: its files are
read and written directly.
"""
