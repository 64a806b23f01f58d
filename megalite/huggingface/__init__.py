"""Import and export of Hugging Face models: tensor_places.py maps tensors, convert.py converts checkpoints,
adapter_import.py and adapter_export.py LoRA adapters of PEFT.

May import megalite.assembly, checkpoint, model and what is below. Does not import transformers: its files are
read and written directly.
"""
