"""The loss of a model on rows of a run's validation data, in one process and in fp32.

With it an export says what merging and quantizing the weights costs (`convert export --evaluate`).
"""

from __future__ import annotations

from dataclasses import replace

from megalite.assembly import parts as build
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.data.dataset import Dataset
from megalite.data.dataset import build as build_data
from megalite.data.loader import Loader
from megalite.generation.sources import ModelSource, for_inference, load_into
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.system.progress import Report, silent


def validation_sets(config: Config, option: str) -> list[Dataset]:
    """Return the validation sets of a run.

    Args:
        option: for which they are needed, for messages.

    Raises:
        ConfigError: it has none, or they cannot be read.
    """
    if config.data.train is None or not config.data.validation:
        raise ConfigError(
            f"{option} needs validation data, and the run of this checkpoint had none (data.validation). "
            f"Remove {option}, and measure both models with megalite evaluate perplexity."
        )
    _, validation = build_data(config.data, config.run.seed)
    assert validation is not None, "data.validation is set"
    return [*validation.sets.values()]


def held_out_loss(
    source: ModelSource, trained: Config, sets: list[Dataset], rows: int, progress: Report = silent
) -> float:
    """Return the mean loss over the tokens of the first rows of each set, in nats.

    Args:
        trained: the configuration of the run, which says how rows are read.
        rows: of each set, at most.

    Raises:
        CheckpointError, ConfigError: the model cannot be read.
    """
    config = replace(for_inference(source.config), data=trained.data)
    mesh = build.make_mesh(config)
    parts = build.build_parts(config, mesh, "cpu", training=False)
    load_into(parts, source, mesh)
    plan, total, count = build.schedule(config, 1, forward_only=True), 0.0, 0
    for data in sets:
        samples = min(rows, data.samples_per_epoch)
        loader = Loader(
            data,
            global_batch_size=1,
            micro_batch_size=1,
            dp=mesh.coordinates["dp"],
            reset_positions=trained.data.reset_positions,
            eod_mask_loss=trained.data.eod_mask_loss,
            vocab_size=config.model.vocab_size,
            make=build.microbatch_maker(config, mesh.cp),
            samples=samples,
        )
        try:
            for sample in range(samples):
                progress(f"loss of {source.name}", sample, samples, "rows")
                batch = loader.step(sample)
                statistics, _ = parts.runtime.run(plan, batch, step=0, loss_scale=1.0, training=False)
                total += statistics["loss"].item()
                count += int((batch[0].targets != IGNORE_INDEX).sum())
        finally:
            loader.close()
    return total / max(count, 1)
