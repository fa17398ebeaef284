"""The recipe: one typed, frozen object, loaded from TOML and `--dotted.flags` (`recipe/toml.py`).

This package does not import torch or any other module of Sixfold. Each section owns its settings:
no setting is read outside the role it is named for. A section has at most 25 settings
(`tests/shape`).

The recipe holds the requested values. Resolved values (micro-batches, KV cache blocks, ...) are
computed in `recipe/plan.py` and printed by `sixfold explain`.
"""

from .algorithm import AlgorithmConfig, CriticConfig, ReferenceConfig
from .backend import Backend, EngineBackend, SglangBackend, SixfoldBackend, VllmBackend
from .base import NAME, PATTERNS, device_name
from .comparisons import ComparisonsConfig
from .data import ArithmeticConfig, CurriculumConfig, DataConfig, GymConfig, SourceConfig
from .engine import EngineConfig
from .environment import AgentConfig, EnvironmentConfig
from .model import ALL_LINEAR, LoraConfig, ModelConfig, ScratchConfig
from .moe import MoeConfig
from .parallel import ParallelConfig
from .placement import Placement, ProcessPlacement, RayPlacement, SamplersApart
from .preemption import Preemption
from .preference import PreferenceConfig
from .pretrain import PretrainConfig
from .prm import PrmConfig, ProcessScoringConfig
from .recipe import Recipe
from .records import CheckpointConfig, EvalConfig, LogConfig
from .replay import ReplayConfig
from .reward_model import RewardModelConfig, RewardScoringConfig
from .rollout import RolloutConfig
from .run import RunConfig
from .sample import MixConfig, SampleConfig, SampleSearchConfig
from .speculation import DraftSpeculation, NgramSpeculation, NoSpeculation, Speculation
from .sync import CopySyncConfig, SharedSyncConfig, SyncConfig
from .trainer import SftConfig, TrainerConfig
