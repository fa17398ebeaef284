"""Settings of the rollout."""

from __future__ import annotations

from .backend import Backend, EngineBackend
from .base import Real, Section, StopText, knob


class RolloutConfig(Section):
    """Number of prompts and completions, and how completions are sampled."""

    prompts_per_step: int = knob(8, "tasks per step", ge=1)
    samples_per_prompt: int = knob(8, "completions per task (K)", ge=1)
    oversample: int = knob(
        0,
        "samples to start per task; the first K finished samples with unequal rewards are"
        " kept and the others aborted (0: start K)",
        ge=0,
    )
    max_new_tokens: int = knob(64, "longest completion in tokens; in an episode, of a reply", ge=1)
    max_turns: int = knob(
        8,
        "maximum number of replies of an episode, with environment.episode; an episode that reaches"
        " it ends with the sum of the rewards of its turns",
        ge=1,
    )
    max_episode_tokens: int = knob(
        0,
        "maximum number of tokens of an episode after its prompt, with environment.episode: replies"
        " and observations (0: room for max_turns replies of max_new_tokens)",
        ge=0,
    )
    branches: int = knob(
        1,
        "number of samples of a task that share the first turns of an episode and diverge after"
        " them, with environment.episode; must divide samples_per_prompt (1: every sample plays"
        " from the start)",
        ge=1,
    )
    branch_turn: int = knob(
        1,
        "with branches > 1: number of replies after which the samples diverge (0: at the first"
        " observation with Observation.branch)",
        ge=0,
    )
    staleness: int = knob(
        0,
        "steps by which the weights that sample may be older than those that train; above 0,"
        " sampling goes on while the trainer trains",
        ge=0,
        le=64,
    )
    window: Real = knob(
        0.3,
        "with staleness > 0: share of the started groups, from the oldest on, of which a step takes"
        " the finished ones (0: always the oldest groups)",
        ge=0,
        le=1,
    )
    max_failures: int = knob(
        0,
        "failures after which a prompt is written to dead_letters.jsonl and not sampled again; it"
        " fails if the episodes or checks of all its samples fail (0: it is never set aside)",
        ge=0,
    )
    temperature: Real = knob(
        1.0, "sampling temperature; log-probs are computed at the same temperature", ge=1e-20
    )
    top_p: Real = knob(
        1.0,
        "sample from the smallest set of tokens with at least this probability; log-probs"
        " are computed over the same set (1: off)",
        gt=0,
        le=1,
    )
    top_k: int = knob(
        0,
        "sample from the k most probable tokens; log-probs are computed over the same set (0: off)",
        ge=0,
    )
    min_p: Real = knob(
        0.0,
        "sample from tokens whose probability is at least this share of the largest;"
        " log-probs are computed over the same set (0: off)",
        ge=0,
        lt=1,
    )
    stop_tokens: tuple[str, ...] = knob(
        ("auto",),
        "tokens that end a completion; auto: the model's end tokens and the end of a turn"
        " in its chat template",
    )
    stop: tuple[StopText, ...] = knob(
        (), "texts that end a completion; the graded text ends before the first of them"
    )
    backend: Backend = knob(
        EngineBackend(),
        "program that samples: the embedded engine, a vLLM process, or a running SGLang or"
        " Sixfold server",
        discriminator="kind",
    )
