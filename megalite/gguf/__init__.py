"""GGUF files, which llama.cpp and programs on top of it read, from checkpoints."""
