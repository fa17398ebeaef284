"""The recipe: one typed, frozen object, loaded from TOML and `--dotted.flags` (`recipe/toml.py`).

This module does not import torch or any other module of Sixfold. Each section owns its settings: no
setting is read outside the role it is named for. A section has at most 25 settings (`tests/shape`).

The recipe holds the requested values. Resolved values (micro-batches, KV cache blocks, ...) are
computed in `recipe/plan.py` and printed by `sixfold explain`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError


def _finite(x: float) -> float:
    if not math.isfinite(x):
        raise ValueError("must be finite")
    return x


def device_name(name: str) -> str:
    """Return the name if it is a supported device.

    Raises:
        ValueError: if it is not a device, or if there are no kernels for it.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        return name
    if name.startswith("cuda"):
        raise PydanticCustomError("unsupported", "write cuda, or cuda:N for GPU number N")
    if name.split(":")[0] in ("mps", "xpu", "hpu", "npu", "xla", "tpu"):
        raise PydanticCustomError(
            "unsupported", "not supported; use cpu, or cuda on a machine with such a GPU"
        )
    raise ValueError("no device")


Real = Annotated[float, AfterValidator(_finite)]
Device = Annotated[
    str,
    AfterValidator(device_name),
    WithJsonSchema({"type": "string", "enum": ["auto", "cpu", "cuda"]}),
]
"""auto, cpu, cuda, or cuda:N."""
Decay = Annotated[Real, Field(ge=0, lt=1)]
StopText = Annotated[str, Field(min_length=1)]
NAME, ASSIGNMENT, DEVICES = (
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    r"^[A-Za-z_][A-Za-z0-9_]*=",
    r"^(\d+(,\d+)*)?$",
)
PATTERNS = {
    NAME: "of letters, digits, '.', '_' and '-' that starts with a letter or digit",
    ASSIGNMENT: "of the form NAME=VALUE",
    DEVICES: "of numbers, separated by commas",
}
"""Descriptions of the text patterns, for error messages and `--help`."""
Assignment = Annotated[str, Field(pattern=ASSIGNMENT)]


def knob(default: Any, description: str, **bounds: Any) -> Any:
    """Define a setting.

    Args:
        default: default value.
        description: one line for `--help`.
        bounds: constraints of `pydantic.Field`.
    """
    return Field(default, description=description, **bounds)


class Section(BaseModel):
    """Base of all sections: immutable, strict about types, refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunConfig(Section):
    """What the run is called, where it lives, when it ends."""

    name: str = knob("run", "name of the run; its folder is DIR/NAME", pattern=NAME)
    dir: str = knob("runs", "folder that holds the runs")
    seed: int = knob(0, "the seed of everything: tasks, weights, sampling noise", ge=0)
    steps: int = knob(100, "RL steps", ge=0)
    max_minutes: Real = knob(
        0.0, "stop after this much wall time, with a checkpoint (0: no limit)", ge=0
    )
    target_reward: Real = knob(
        0.0,
        "stop once the moving average of the reward reaches this, from step 10 on (0: never)",
        ge=0,
    )
    device: Device = knob(
        "auto",
        "where the model lives: auto (a GPU if there is one), cpu, cuda, or cuda:N for GPU"
        " number N",
    )
    precision: Literal["float32", "bfloat16"] = knob(
        "float32", "of the forward passes; weights and gradients stay float32"
    )
    threads: int = knob(0, "CPU threads for torch (0: every core)", ge=0, le=1024)


class ScratchConfig(Section):
    """Sizes of a model made from scratch (Qwen3 architecture, character tokenizer)."""

    alphabet: str = knob(
        "0123456789+-*/=()<>#;:,.? abcdefghijklmnopqrstuvwxyz\n", "characters of the tokenizer"
    )
    hidden_size: int = knob(128, "width", ge=8)
    layers: int = knob(4, "decoder layers", ge=1)
    heads: int = knob(4, "query heads", ge=1)
    kv_heads: int = knob(2, "key-value heads", ge=1)
    head_dim: int = knob(32, "size of a head", ge=2)
    intermediate_size: int = knob(384, "width of the MLP", ge=8)
    context: int = knob(512, "longest sequence, prompt and completion together", ge=8)


class ModelConfig(Section):
    """The policy: a Hugging Face causal LM, loaded or made from scratch."""

    path: str = knob("", "model folder or hub id; empty: make one from [model.scratch]")
    revision: str = knob("", "branch, tag or commit of a hub model; empty: the newest")
    chat_template: str = knob(
        "auto",
        "auto: the tokenizer's own template; none: plain text prompts; a Jinja file; or a name,"
        " where the tokenizer has several",
        min_length=1,
    )
    template_args: tuple[Assignment, ...] = knob(
        (), "variables of the chat template, e.g. enable_thinking=false; the saved model keeps them"
    )
    scratch: ScratchConfig = ScratchConfig()


class ArithmeticConfig(Section):
    """Tasks of the built-in arithmetic environment: sums with worked traces."""

    terms: int = knob(2, "numbers in a sum", ge=2, le=8)
    digits: int = knob(3, "most digits of a number", ge=1, le=12)


class GymConfig(Section):
    """Tasks generated by reasoning-gym."""

    tasks: tuple[str, ...] = knob((), "dataset names of the library, e.g. chain_sum")
    options: tuple[str, ...] = knob((), "settings of the generators, e.g. chain_sum.max_terms=4")
    size: int = knob(2000, "tasks generated per dataset, training and held-out together", ge=1)


class SourceConfig(Section):
    """One of several data sources: an entry of [[data.sources]].

    Missing settings come from [data].
    """

    source: str = Field(description="as data.source")
    name: str = knob(
        "", "what its tasks are called in ids and reports; empty: the source", max_length=80
    )
    weight: Real = knob(1.0, "share of each step's prompts, relative to the other sources", gt=0)
    subset: str = knob("", "as data.subset")
    revision: str = knob("", "as data.revision")
    split: str = knob("train", "as data.split")
    heldout_split: str = knob("", "as data.heldout_split")
    limit: int = knob(0, "as data.limit", ge=0)
    prompt_field: str | None = knob(None, "as data.prompt_field")
    answer_field: str | None = knob(None, "as data.answer_field")
    answer_after: str | None = knob(None, "as data.answer_after")
    trace_field: str | None = knob(None, "as data.trace_field")
    id_field: str | None = knob(None, "as data.id_field")
    system_prompt: str | None = knob(None, "as data.system_prompt")
    prompt_suffix: str | None = knob(None, "as data.prompt_suffix")

    @property
    def label(self) -> str:
        """Display name of the source."""
        return self.name or self.source


class DataConfig(Section):
    """Where tasks come from, and how rows become prompts.

    Nested columns are named by dotted path: reward_model.ground_truth.
    """

    source: str = knob(
        "arithmetic",
        "arithmetic, reasoning_gym, a .jsonl/.json/.csv/.tsv/.parquet file, a dataset folder, or a"
        " hub id",
    )
    sources: tuple[SourceConfig, ...] = knob(
        (),
        "several sources in place of `source`, each a table [[data.sources]]; steps draw from them"
        " by weight",
    )
    subset: str = knob("", "configuration name of a hub dataset, e.g. main")
    revision: str = knob("", "branch, tag or commit of a hub dataset; empty: the newest")
    split: str = knob("train", "split to train on")
    heldout_split: str = knob(
        "",
        "split (for a file: another file) to evaluate on, whole; empty: `heldout` tasks are set"
        " aside",
    )
    heldout: int = knob(
        512, "tasks set aside from training to evaluate on, where no heldout_split is named", ge=0
    )
    prompt_field: str = knob(
        "question", "column that holds the prompt (text, or a list of chat messages)"
    )
    answer_field: str = knob("answer", "column that holds the reference answer")
    answer_after: str = knob(
        "", "the answer is what follows the last of these in its column (GSM8K: ####)"
    )
    trace_field: str = knob("", "column that holds a worked solution for SFT; empty: none")
    id_field: str = knob(
        "id",
        "column that holds an id unique to the row; empty, or no such column: split and row number",
    )
    system_prompt: str = knob("", "system message put before every prompt")
    prompt_suffix: str = knob("", "text put after every prompt")
    limit: int = knob(
        0, "use this many rows, drawn from the whole file or split by run.seed (0: all)", ge=0
    )
    max_prompt_tokens: int = knob(
        0, "longest prompt in tokens (0: whatever leaves room for the completion)", ge=0
    )
    overlong: Literal["error", "drop"] = knob(
        "error", "what to do with a longer prompt; drops are counted and reported"
    )
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    reasoning_gym: GymConfig = GymConfig()

    @property
    def names(self) -> list[str]:
        """All data sources."""
        return [s.source for s in self.sources] or [self.source]

    @property
    def heldout_splits(self) -> list[str]:
        """All splits (or files) named for evaluation."""
        return [
            split
            for split in (self.heldout_split, *(s.heldout_split for s in self.sources))
            if split
        ]

    @model_validator(mode="after")
    def _sources_agree(self) -> DataConfig:
        """With [[data.sources]], each entry must say where its rows are, and names must differ."""
        if not self.sources:
            return self
        fields = type(self).model_fields
        for name in ("source", "subset", "revision", "split", "heldout_split", "limit"):
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"data.{name} and data.sources are both set: put {name} into each table of"
                    " [[data.sources]]"
                )
        labels = [s.label for s in self.sources]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"data.sources: two are called '{label}': give each a name of its own (name ="
                    " ...)"
                )
        return self


class EnvironmentConfig(Section):
    """How answers are checked."""

    rewards: tuple[str, ...] = knob(
        ("arithmetic",),
        "arithmetic, math, reasoning_gym, reasoning_gym_solved, or path.py:function /"
        " module:function; summed",
    )
    weights: tuple[Real, ...] = knob((), "weight of each reward; empty: 1 each")
    timeout_s: Real = knob(
        5.0, "seconds one check may take before it is killed and recorded as an error", gt=0
    )
    error_budget: Real = knob(
        0.1, "share of a step's checks that may fail before the run stops", ge=0, le=1
    )
    workers: int = knob(1, "processes that check answers", ge=1, le=1024)
    preflight: int = knob(
        50,
        "rollouts checked before the first step, to say whether the tasks are too easy or too hard",
        ge=0,
    )


class VllmConfig(Section):
    """The vLLM process, used if rollout.backend is vllm."""

    devices: str = knob(
        "",
        "GPUs of the vLLM process by number, e.g. 1 or 1,2 (empty: the policy's)",
        pattern=DEVICES,
    )
    tensor_parallel: int = knob(
        1, "GPUs that share each weight matrix; name as many in rollout.vllm.devices", ge=1
    )
    memory: Real = knob(
        0.0,
        "share of each GPU's memory that vLLM may take (0: what weights and KV cache need)",
        ge=0,
        le=1,
    )
    sleep: bool = knob(
        False, "move vLLM's weights to host memory and drop its KV cache while the trainer works"
    )


class RolloutConfig(Section):
    """Number of prompts and completions, and how completions are sampled."""

    prompts_per_step: int = knob(8, "tasks per step", ge=1)
    samples_per_prompt: int = knob(8, "completions per task (K)", ge=1)
    oversample: int = knob(
        0,
        "samples to start of a task, of which the first K that teach something are kept (0: K)",
        ge=0,
    )
    max_new_tokens: int = knob(64, "longest completion in tokens", ge=1)
    temperature: Real = knob(1.0, "sampling temperature; scoring uses the same", ge=1e-20)
    top_p: Real = knob(
        1.0,
        "sample from the fewest tokens that reach this probability; scoring uses the same set (1:"
        " off)",
        gt=0,
        le=1,
    )
    top_k: int = knob(
        0, "sample from the k most probable tokens; scoring uses the same set (0: off)", ge=0
    )
    min_p: Real = knob(
        0.0,
        "sample from tokens at least this share as probable as the best; scoring uses the same set"
        " (0: off)",
        ge=0,
        lt=1,
    )
    stop_tokens: tuple[str, ...] = knob(
        ("auto",),
        "tokens that end a completion; auto: the model's end tokens and what ends a turn in its"
        " chat template",
    )
    stop: tuple[StopText, ...] = knob(
        (), "texts that end a completion; the graded text ends before the first of them"
    )
    backend: str = knob(
        "engine",
        "who samples: engine (the embedded one), vllm, vllm:/path/to/python, or"
        " sglang:http://host:port",
    )
    vllm: VllmConfig = VllmConfig()


class EngineConfig(Section):
    """The embedded inference engine."""

    block_size: int = knob(16, "tokens in one block of the paged KV cache", ge=1)
    max_running: int = knob(256, "sequences decoded together", ge=1)
    kv_tokens: int = knob(
        0,
        "tokens that the KV cache holds (0: enough for max_running full-length sequences, on a GPU"
        " at most what is free beside training)",
        ge=0,
    )
    cuda_graphs: Literal["auto", "on", "off"] = knob(
        "auto",
        "launch a decode step as one captured CUDA graph: auto (on a GPU; off after a capture that"
        " fails), on (a failure is an error), off",
    )
    prefill_tokens_per_step: int = knob(4096, "prompt tokens computed in one engine step", ge=1)
    prefix_cache: Literal["radix", "hash", "none"] = knob(
        "radix", "how beginnings that prompts have in common are found, to be computed once"
    )
    preemption: Literal["none", "recompute", "swap"] = knob(
        "none",
        "not none: admit by the room for the prompt, and where blocks run out stop sequences, to be"
        " computed again or swapped to host memory",
    )
    speculation: Literal["none", "ngram"] = knob(
        "none",
        "guess tokens from what the text repeats and check several in one forward; same tokens",
    )
    release_kv: bool = knob(
        False,
        "give the cache's memory back while the trainer works (a GPU shared by both may need it)",
    )


class AlgorithmConfig(Section):
    """Algorithm of the zoo, and what to change in it.

    None: the named algorithm's own choice (`sixfold algorithms` lists them).
    """

    name: str = knob("grpo", "which algorithm of the zoo")
    advantage: str | None = knob(
        None, "how rewards become advantages, e.g. group_zscore, leave_one_out, gae"
    )
    loss: str | None = knob(
        None, "token loss, e.g. clipped_surrogate, sequence_surrogate, clipped_weight"
    )
    aggregation: Literal["token", "sequence", "sequence-sum", "constant", "prompt"] | None = knob(
        None, "how token losses are averaged"
    )
    clip_low: Real | None = knob(None, "ratio is clipped below 1 - clip_low", gt=0)
    clip_high: Real | None = knob(None, "ratio is clipped above 1 + clip_high", gt=0)
    dual_clip: Real | None = knob(
        None, "where A < 0 the loss is capped at -dual_clip * A (0: off)", ge=0
    )
    tau: Real | None = knob(
        None, "temperature of a soft gate, or strength of the mirror step", gt=0
    )
    lam: Real | None = knob(None, "GAE lambda", ge=0, le=1)
    beta: Real | None = knob(
        None, "weight of the KL to the reference; 0: no reference model is kept", ge=0
    )
    kl: Literal["k1", "k2", "k3", "k3+", "k3-unbiased"] | None = knob(None, "KL estimator")
    kl_in: Literal["loss", "reward"] | None = knob(
        None, "KL as a loss term, or taken off the reward"
    )
    kl_target: Real | None = knob(None, "adapt beta until the KL is this (0: beta is fixed)", ge=0)
    whiten: Literal["none", "all", "source"] | None = knob(
        None, "standardise rewards by a running mean and std, of all tasks or per source"
    )
    entropy_bonus: Real | None = knob(None, "weight of the policy's entropy in the objective", ge=0)
    entropy_target: Real | None = knob(
        None,
        "adapt the entropy bonus to hold the entropy at this, in nats (0: the bonus is fixed)",
        ge=0,
    )
    entropy_rule: Literal["none", "clip-cov", "kl-cov", "top-entropy"] | None = knob(
        None, "tokens held back, or trained alone, for entropy's sake"
    )
    correction: (
        Literal[
            "none",
            "truncated",
            "truncated-sequence",
            "masked",
            "masked-sequence",
            "geometric",
            "decoupled",
            "negative-sequence",
        ]
        | None
    ) = knob(None, "importance weights for samples of older, or numerically other, weights")
    correction_low: Real | None = knob(
        None, "lowest importance weight that the correction lets through", ge=0
    )
    correction_high: Real | None = knob(
        None, "highest importance weight that the correction lets through", gt=0
    )
    overlong_buffer: Real | None = knob(
        None, "reward falls over this last share of max_new_tokens (0: off)", ge=0, lt=1
    )
    length_penalty: Literal["none", "kimi", "cosine", "stop-properly"] | None = knob(
        None, "reward by length; stop-properly: cut off pays nothing"
    )
    dynamic_sampling: int | None = knob(
        None,
        "most rounds of sampling in a step, to replace groups whose rewards are all equal (0: off)",
        ge=0,
    )
    epochs: int | None = knob(None, "passes over a step's samples", ge=1)
    minibatches: int | None = knob(None, "optimizer steps in a pass", ge=1)


class CriticConfig(Section):
    """The value model of algorithms that need one (PPO)."""

    body: Literal["own", "policy", "none"] = knob(
        "own",
        "own: a copy of the policy with a value head; policy: a head on the policy's features",
    )
    learning_rate: Real = knob(1e-5, "AdamW learning rate of the critic", gt=0)
    warmup_steps: int = knob(0, "steps at the start in which only the critic learns", ge=0)


class ReferenceConfig(Section):
    """The frozen model that the KL is measured against, or the teacher for distillation."""

    path: str = knob(
        "", "its folder or hub id, e.g. a teacher; empty: the policy as it is before RL"
    )
    placement: Literal["inline", "worker", "fused"] = knob(
        "inline",
        "scored in the loop; by a process beside it while answers are checked; or by the trainer,"
        " packed once (KL in the loss only)",
    )
    threads: int = knob(1, "CPU threads of the worker", ge=1, le=1024)
    reset_every: int = knob(0, "copy the policy into the reference every N steps (0: never)", ge=0)
    reset_patience: int = knob(
        0,
        "the same once held-out accuracy has not risen for N evaluations (0: never); the optimizer"
        " starts afresh too",
        ge=0,
    )


class TrainerConfig(Section):
    """The optimizer, the learning rate schedule and the micro-batches."""

    learning_rate: Real = knob(1e-6, "AdamW learning rate", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "constant", "learning rate after warm-up: constant, or decaying to 0 at the last update"
    )
    warmup_steps: int = knob(0, "updates over which the learning rate rises from 0", ge=0)
    betas: tuple[Decay, Decay] = knob(
        (0.9, 0.95),
        "AdamW's betas; with 0.95 the second forgets a gradient spike in about 20 steps",
    )
    epsilon: Real = knob(1e-8, "AdamW epsilon", gt=0)
    weight_decay: Real = knob(
        0.0, "AdamW weight decay; the KL cannot see the drift it causes, so 0 for RL", ge=0
    )
    grad_clip: Real = knob(1.0, "largest gradient norm", gt=0)
    max_tokens_per_microbatch: int = knob(4096, "tokens in one forward and backward", ge=16)
    logprob_chunk: int = knob(1024, "positions whose logits exist at one time", ge=16)
    activation_checkpointing: Literal["none", "selective", "full"] = knob(
        "none", "recompute activations in the backward pass to save memory"
    )
    share_prefix: bool = knob(
        True, "compute a prompt once for all its completions, forward and backward"
    )
    max_skipped_steps: int = knob(
        3, "stop after this many updates in a row whose gradient was not finite", ge=1
    )


class SftConfig(Section):
    """Supervised warm-up on the tasks' worked solutions, by the same trainer."""

    steps: int = knob(0, "most SFT steps before RL (0: none)", ge=0)
    examples_per_step: int = knob(64, "worked solutions per step", ge=1)
    learning_rate: Real = knob(1e-3, "AdamW learning rate", gt=0)
    warmup_steps: int = knob(10, "steps over which the learning rate rises from 0", ge=0)
    weight_decay: Real = knob(0.1, "AdamW weight decay", ge=0)
    stop_at_accuracy: Real = knob(
        0.0,
        "end the warm-up once this share of a probe set is solved greedily, of each source (0: run"
        " all steps)",
        ge=0,
        le=1,
    )


class SyncConfig(Section):
    """How new weights reach the engine."""

    mode: Literal["shared", "copy", "int8", "fp8"] = knob(
        "shared",
        "shared: engine and trainer are one module; copy: the engine has its own weights; int8,"
        " fp8: its own, rounded as if quantised",
    )
    every: int = knob(
        1, "sync every N steps (not with shared): more than 1 makes rollouts stale on purpose", ge=1
    )

    @property
    def quantised(self) -> bool:
        """True if the engine samples from quantised weights, which differ from the trainer's."""
        return self.mode in ("int8", "fp8")


class EvalConfig(Section):
    """Held-out evaluation during training and by `sixfold eval`."""

    every: int = knob(10, "steps between held-out evaluations (0: first and last only)", ge=0)
    tasks: int = knob(
        0,
        "held-out tasks per evaluation during training (0: all); the first and last always use all",
        ge=0,
    )
    samples: int = knob(1, "completions per task", ge=1)
    temperature: Real = knob(0.0, "0: greedy", ge=0)
    metric: str = knob(
        "",
        "what is evaluated: the name of a reward, or 'reward' for the weighted sum; empty: the"
        " verifier among them",
    )
    solved_at: Real = knob(
        1.0,
        "a completion counts as solved from this value of the metric on; for 'reward', times the"
        " sum of the weights",
    )


class CheckpointConfig(Section):
    """What is kept on disk to resume from."""

    every: int = knob(
        50, "steps between checkpoints, of SFT and of RL (0: at their ends only)", ge=0
    )
    keep: int = knob(2, "newest checkpoints kept", ge=1)


class LogConfig(Section):
    """Where metrics go besides metrics.jsonl. Nothing leaves the machine unless wandb is named."""

    to: tuple[Literal["csv", "tensorboard", "trackio", "wandb"], ...] = knob(
        (),
        "csv: metrics.csv, metrics.jsonl as a table; tensorboard: event files; trackio: locally;"
        " wandb: to Weights & Biases (extras of their names)",
    )
    project: str = knob("sixfold", "project of the run in trackio and wandb", min_length=1)
    entity: str = knob("", "user or team of the run in wandb (empty: your default there)")
    rollouts_every: int = knob(1, "steps between dumps of every trajectory (0: never)", ge=0)


class Recipe(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        """Refuse settings that are valid on their own but contradict each other."""
        if self.sync.every > 1 and self.sync.mode == "shared":
            raise ValueError(
                "sync.every > 1 needs sync.mode = 'copy': a shared module is never stale"
            )
        if self.environment.weights and len(self.environment.weights) != len(
            self.environment.rewards
        ):
            raise ValueError(
                f"environment.weights has {len(self.environment.weights)} entries for"
                f" {len(self.environment.rewards)} rewards: give one each"
            )
        if not self.environment.rewards:
            raise ValueError("environment.rewards is empty: name at least one, e.g. ['math']")
        if self.model.scratch.heads % self.model.scratch.kv_heads:
            raise ValueError(
                f"model.scratch.heads ({self.model.scratch.heads}) must be a multiple of kv_heads"
                f" ({self.model.scratch.kv_heads})"
            )
        if "reasoning_gym" in self.data.names and not self.data.reasoning_gym.tasks:
            raise ValueError(
                "data.source is reasoning_gym but data.reasoning_gym.tasks is empty: name datasets,"
                " e.g. ['chain_sum']"
            )
        return self
