"""Frozen matrices in few bits (`lora.base`): where their bytes are, how they are read and multiplied."""
