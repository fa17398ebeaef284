"""The recipe: all sections, and the checks between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter, model_validator

from .algorithm import AlgorithmConfig, CriticConfig, ReferenceConfig
from .base import Section, knob
from .comparisons import ComparisonsConfig
from .data import DataConfig
from .engine import EngineConfig
from .environment import EnvironmentConfig
from .judge import REWARDS as JUDGE_REWARDS
from .model import LoraConfig, ModelConfig
from .moe import MoeConfig
from .parallel import ParallelConfig
from .placement import LocalPlacement, Placement, ProcessPlacement
from .preference import PreferenceConfig
from .pretrain import PretrainConfig
from .prm import PrmConfig
from .records import CheckpointConfig, EvalConfig, LogConfig
from .replay import ReplayConfig
from .reward_model import RewardModelConfig
from .rollout import RolloutConfig
from .run import RunConfig
from .sample import SampleConfig
from .sync import SharedSyncConfig, SyncConfig
from .trainer import SftConfig, TrainerConfig


@cache
def _section_kinds(section: type[BaseModel], name: str) -> TypeAdapter[BaseModel]:
    """Reads one of the kinds of a section's field."""
    kinds: Any = section.model_fields[name].annotation
    return TypeAdapter(kinds)


def _update(section: BaseModel, key: str, value: object) -> dict[str, object]:
    """Changed field of a section: a value, or a section with that change."""
    name, _, rest = key.partition(".")
    inner = getattr(section, name)
    if rest == "kind":  # another kind has other settings
        kinds = _section_kinds(type(section), name)
        return {name: kinds.validate_python({"kind": value})}
    return {name: inner.model_copy(update=_update(inner, rest, value)) if rest else value}


class Recipe(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig = ReplayConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    trainer: TrainerConfig = TrainerConfig()
    moe: MoeConfig = MoeConfig()
    pretrain: PretrainConfig = PretrainConfig()
    sft: SftConfig = SftConfig()
    preference: PreferenceConfig = PreferenceConfig()
    comparisons: ComparisonsConfig = ComparisonsConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    prm: PrmConfig = PrmConfig()
    sample: SampleConfig = SampleConfig()
    parallel: ParallelConfig = ParallelConfig()
    placement: Placement = knob(
        LocalPlacement(),
        "where samplers run: local (in the trainer's process), or in processes of their own",
        discriminator="kind",
    )
    sync: SyncConfig = knob(
        SharedSyncConfig(),
        "how new weights reach the engine: shared (one module), copy, or a copy with weights"
        " rounded as if quantised (int8, fp8)",
        discriminator="kind",
    )
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def quantised_sampling(self) -> bool:
        """True if the engine's log-probs differ from the policy's because of quantisation."""
        return self.sync.quantised or self.engine.kv_dtype == "int8"

    @property
    def engines_apart(self) -> bool:
        """True if embedded engines have weights of their own, in processes or ahead."""
        embedded = self.rollout.backend.kind == "engine"
        return embedded and (self.placement.apart or self.rollout.staleness > 0)

    @property
    def engine_here(self) -> bool:
        """True if embedded engines use the memory of the trainer's device."""
        own = isinstance(self.placement, ProcessPlacement) and bool(self.placement.devices)
        return self.rollout.backend.kind == "engine" and not own

    @property
    def samples_apart(self) -> bool:
        """True if the sampler's weights are not those in the trainer's memory."""
        outside = self.rollout.backend.kind != "engine"
        return self.engines_apart or outside or self.sync.kind != "shared"

    @property
    def samples_current(self) -> bool:
        """True if a step is sampled from the weights that it then updates, not from older ones."""
        older = self.rollout.staleness or self.replay.share
        return self.sync.kind == "shared" and not older

    @property
    def full_sft(self) -> bool:
        """True if SFT trains all weights of a model from scratch, before it gets its adapter."""
        return self.sft.steps > 0 and self.model.lora.rank > 0 and not self.model.path

    @property
    def episode_tokens(self) -> int:
        """Most tokens of an episode after its prompt, if the model's context has room for them."""
        rollout = self.rollout
        if not self.environment.several_turns:
            return rollout.max_new_tokens
        return rollout.max_episode_tokens or rollout.max_turns * rollout.max_new_tokens

    def with_settings(self, settings: Mapping[str, object]) -> Recipe:
        """This recipe with other values, which are not checked.

        Args:
            settings: dotted name of a setting -> value.
        """
        changed = self
        for key, value in settings.items():
            changed = changed.model_copy(update=_update(changed, key, value))
        return changed

    def sampling_alone(self) -> Recipe:
        """This recipe for a model that is not trained, such as in an evaluation.

        The model itself samples, not a quantised copy, and its adapter is merged.
        """
        return self.with_settings(
            {
                "rollout.staleness": 0,
                "sync": SharedSyncConfig(),
                "engine.kv_dtype": "auto",
                "model.lora": LoraConfig(),
            }
        )

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        """Refuse settings that are valid on their own but contradict each other."""
        if self.environment.weights and len(self.environment.weights) != len(
            self.environment.rewards
        ):
            raise ValueError(
                f"environment.weights has {len(self.environment.weights)} entries for"
                f" {len(self.environment.rewards)} rewards. Give one per reward"
            )
        tools = self.environment.tools
        if (tools.functions or tools.mcp) and not self.environment.episode:
            raise ValueError(
                "environment.tools has no effect without environment.episode. Set"
                " environment.episode = 'tools'"
            )
        data = self.data
        if self.environment.several_turns:
            forms = [one.prompt_form or data.prompt_form for one in data.sources or (data,)]
            begun = [data.prefill, *(one.prefill for one in data.sources)]
            for name, value in (("prompt_form", set(forms) - {"messages"}), ("prefill", begun)):
                if any(value):
                    raise ValueError(
                        f"data.{name} begins the only reply of a task, but environment.episode and"
                        " environment.agent play several. Leave it at its default"
                    )
        if not self.environment.rewards:
            raise ValueError("environment.rewards is empty: name at least one, e.g. ['math']")
        named = (*self.environment.rewards, self.eval.strict)
        judged = [name for name in named if name in JUDGE_REWARDS]
        if judged and not self.environment.judge.model:
            raise ValueError(
                f"the reward '{judged[0]}' needs a judging model: set environment.judge.url and"
                " environment.judge.model, or environment.judge.model alone for a local folder"
            )
        if 0 < self.rollout.max_episode_tokens < self.rollout.max_new_tokens:
            raise ValueError(
                f"rollout.max_episode_tokens = {self.rollout.max_episode_tokens} is less than one"
                f" reply, rollout.max_new_tokens = {self.rollout.max_new_tokens}. Raise it, or set"
                " 0"
            )
        scratch = self.model.scratch
        if scratch.architecture == "qwen3" and scratch.heads % scratch.kv_heads:
            raise ValueError(
                f"model.scratch.heads ({scratch.heads}) must be a multiple of kv_heads"
                f" ({scratch.kv_heads})"
            )
        if "reasoning_gym" in self.data.names and not self.data.reasoning_gym.tasks:
            raise ValueError(
                "data.source is reasoning_gym but data.reasoning_gym.tasks is empty: name datasets,"
                " e.g. ['chain_sum']"
            )
        return self
