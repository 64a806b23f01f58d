"""Hugging Face model families: config.json to and from ModelConfig, names of modules, presets
and the Hub. Free of torch."""
