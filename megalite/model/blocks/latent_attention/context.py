"""What latent attention exchanges under context parallelism: latents, or keys and values as any attention.

The exchange itself is `parallel.context.latents`.
"""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig


def latent_width(model: ModelConfig) -> int:
    """Return the width of a token's latent and shared key."""
    return (model.kv_lora_rank or 0) + model.qk_rope_head_dim


def latents_travel(model: ModelConfig, method: str, cp: int, tp: int, sequence_parallel: bool) -> bool:
    """Return whether attention over cp exchanges latents, from which each rank computes keys and values.

    It does where a rank sends fewer bytes so. The matmuls that are added take about kv_lora_rank operations
    per byte that is saved, and a GPU computes more than those while a byte passes its links (an H100 over
    NVLink about 1,300).
    """
    if cp == 1 or method == "ulysses":
        return False
    keys_and_values = model.num_attention_heads // tp * (model.head_size + model.value_size)
    # each has the latents of a part of the tokens, but keys and values of all
    senders = tp if sequence_parallel else 1
    return latent_width(model) < keys_and_values * senders
