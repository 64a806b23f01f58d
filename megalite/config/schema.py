"""`Config`: the sections of sections/ together, and a table of all options."""

from dataclasses import Field, dataclass, field, fields
from typing import Any

from megalite.config.option import NO_OPTION
from megalite.config.sections.ademamix import AdEMAMixConfig
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.config.sections.data import DataConfig
from megalite.config.sections.distillation import DistillationConfig
from megalite.config.sections.faults import FaultsConfig
from megalite.config.sections.fp16 import FP16Config
from megalite.config.sections.logging import LoggingConfig
from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.muon import MuonConfig
from megalite.config.sections.network import NetworkConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.config.sections.parallel import ParallelConfig
from megalite.config.sections.preference import PreferenceConfig
from megalite.config.sections.profiling import ProfilingConfig
from megalite.config.sections.run import RunConfig
from megalite.config.sections.store import StoreConfig
from megalite.config.sections.train import TrainConfig
from megalite.config.sections.validation import ValidationConfig


@dataclass
class Config:
    """All options of a run, as `--print_config` prints them and the run's directory stores them."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    fp16: FP16Config = field(default_factory=FP16Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    ademamix: AdEMAMixConfig = field(default_factory=AdEMAMixConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)


SHORT = {
    **{name: f"parallel.{name}" for name in ("tp", "pp", "dp", "cp", "ep", "zero")},
    "faults": "faults.inject",
}
SECTIONS = [section.name for section in fields(Config)]
OPTIONS: dict[str, Field[Any]] = {
    f"{section.name}.{key.name}": key
    for section in fields(Config)
    for key in fields(section.type)  # type: ignore[arg-type]
    if key.metadata != NO_OPTION
}
"""Every option, section.key → its dataclass field."""
