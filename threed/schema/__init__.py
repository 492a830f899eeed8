"""The schema: every key of a config, each told once, at its field: type, default, meaning, and which values
it may have (`keys.key`). `threed.config` reads and checks a config by it; configs/reference.yaml and
docs/reference/config.md are written from it. Import from here, not from the modules below.
"""

from threed.schema.config import Config, keys_of
from threed.schema.keys import KeySpec, key
from threed.schema.layout import (
    KEYS,
    PIECES,
    ActivationConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    ZeroConfig,
)
from threed.schema.loggers import LOGGERS
from threed.schema.model import LayersConfig, ModelConfig
from threed.schema.running import MonitorConfig, RunConfig
from threed.schema.training import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig

__all__ = ["KEYS", "LOGGERS", "PIECES", "ActivationConfig", "CheckpointConfig", "Config", "DataConfig",
           "KeySpec", "LayersConfig", "ModelConfig", "MonitorConfig", "OffloadConfig", "OptimizerConfig",
           "ParallelConfig", "PrecisionConfig", "RunConfig", "TrainConfig", "ZeroConfig", "key", "keys_of"]
