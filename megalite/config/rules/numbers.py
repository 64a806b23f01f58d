"""Numbers in their ranges, and names that are names."""

from megalite.config.rule import Rule, bounded

_SIZES = {
    "parallel": "tp pp dp cp dp_shard virtual_stages powersgd_rank",
    "model": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings sliding_window",
    "data": "sequence_length",
    "train": "steps global_batch_size micro_batch_size",
    "optimizer": "base_batch_size",
    "fp16": "loss_scale_window hysteresis",
    "checkpoint": "interval keep",
    "validation": "interval batches",
    "logging": "interval",
}
_POSITIVE = {
    "model": "rope_theta rms_norm_eps attention_scale attention_softcap logit_softcap embedding_scale initializer_range",
    "parallel": "bucket_mb",
    "optimizer": "eps",
    "fp16": "min_loss_scale",
}
_NOT_NEGATIVE = {
    "run": "seed",
    "parallel": "schedule_costs layer_costs",
    "train": "grad_clip z_loss loss_chunk",
    "optimizer": "lr min_lr warmup_steps weight_decay",
    "fp16": "initial_scale_power",
}
_FRACTIONS = {"model": "embedding_dropout attention_dropout residual_dropout", "train": "label_smoothing", "optimizer": "betas"}

RULES: tuple[Rule, ...] = (
    *bounded(_SIZES, lambda n: n >= 1, "is not a positive size", "Legal values: 1 and above. Nearest: 1."),
    *bounded(_POSITIVE, lambda n: n > 0, "is not a positive number", "Legal values: every number above 0."),
    *bounded(_NOT_NEGATIVE, lambda n: n >= 0, "is negative or not finite", "Legal values: 0 and above. Nearest: 0."),
    *bounded(_FRACTIONS, lambda n: 0 <= n < 1, "is not at least 0 and below 1", "Legal values: from 0 up to, but without, 1."),
    *bounded({"optimizer": "wsd_decay_fraction"}, lambda n: 0 < n <= 1, "is not a share of the steps", "Legal values: above 0, up to 1."),
    Rule("run.name is a directory name", "run.name", lambda c: c.run.name in ("", ".", "..") or "/" in c.run.name).says(
        "is not the name of one directory", "Choose a name without /, and put the path into run.dir."
    ),
)
