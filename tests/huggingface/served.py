"""What vLLM and SGLang read in exported directories, by their code."""

from pathlib import Path

import yaml

READ = yaml.safe_load(Path(__file__).with_name("serving_fields.yaml").read_text())
"""`every` config.json, `quantized` ones by dtype, an `adapter`, and `families`: model_type → engines and fields."""
