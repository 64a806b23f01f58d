"""`Config`: the sections of sections/ together, and a table of all options."""

from dataclasses import Field, dataclass, field, fields
from typing import Any

from megalite.config.errors import ConfigError as ConfigError
from megalite.config.option import NO_OPTION
from megalite.config.sections.checkpoint import CheckpointConfig as CheckpointConfig
from megalite.config.sections.data import DataConfig as DataConfig
from megalite.config.sections.faults import FaultsConfig as FaultsConfig
from megalite.config.sections.fp16 import FP16Config as FP16Config
from megalite.config.sections.logging import LoggingConfig as LoggingConfig
from megalite.config.sections.lora import LoraConfig as LoraConfig
from megalite.config.sections.model import ModelConfig as ModelConfig
from megalite.config.sections.muon import MuonConfig as MuonConfig
from megalite.config.sections.network import NetworkConfig as NetworkConfig
from megalite.config.sections.optimizer import OptimizerConfig as OptimizerConfig
from megalite.config.sections.parallel import ParallelConfig as ParallelConfig
from megalite.config.sections.profiling import ProfilingConfig as ProfilingConfig
from megalite.config.sections.run import RunConfig as RunConfig
from megalite.config.sections.train import TrainConfig as TrainConfig
from megalite.config.sections.validation import ValidationConfig as ValidationConfig


@dataclass
class Config:
    """All options of a run, as `--print_config` prints them and the run's directory stores them."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fp16: FP16Config = field(default_factory=FP16Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
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
