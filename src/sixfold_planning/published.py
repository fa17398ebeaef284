"""Predict published measurements: seconds and bytes of the run that a row of a table describes.

A column that is missing is filled by one of the rules below, and noted as an assumption. A row
without a model, a size or a known device is not predictable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sixfold.errors import UserError

from .architectures import Architecture, dense_of_size, find, size_in_name, with_sizes
from .constants import Constants
from .decode_time import Lengths, Sampler
from .hardware import Accelerator, find_accelerator
from .memory import STATES
from .rl_time import ASYNC, COLOCATED, ONE_STEP_OFF, RlStep, step_phases, sync_seconds
from .train_time import Engine, Layout, pass_seconds, training_pass

TEXTS = (
    "id", "source", "source_loc", "status", "framework", "model", "workload", "algorithm", "gpu",
    "mode", "precision", "recompute", "other_name", "notes",
)  # fmt: skip
"""Columns of text. A prediction reads them, but for `id`, `source_loc`, `status` and `other_name`.
"""

INPUTS = (
    "params_b", "active_b", "n_gpus", "gpus_train", "gpus_rollout", "train_tp", "train_cp",
    "train_ep", "train_pp", "gen_tp", "prompts_or_gbs", "samples_per_prompt", "train_gbs",
    "max_len", "avg_len", "micro_batch",
)  # fmt: skip
"""Columns of numbers that a prediction reads."""

TARGETS = (
    "tokens_s_gpu", "tokens_s_total", "step_s", "gen_s", "logprob_s", "ref_s", "train_s", "sync_s",
    "mem_gib_gpu", "tflops_gpu", "mfu_pct", "gpu_hours", "other_value",
)  # fmt: skip
"""Columns that a prediction may be compared with, and never reads."""


@dataclass(frozen=True)
class Point:
    """One row.

    Attributes:
        texts: columns of `TEXTS`; missing ones are "".
        inputs: numbers of `INPUTS` that the row has.
        published: numbers of `TARGETS` that the row has.
        wordy: targets whose value is text and not a number.
        unreadable: inputs whose value is text and not a number, with the text.
    """

    texts: dict[str, str]
    inputs: dict[str, float]
    published: dict[str, float]
    wordy: tuple[str, ...]
    unreadable: dict[str, str]

    def text(self, column: str) -> str:
        return self.texts[column]


PROMPT_TOKENS = 110
"""Tokens per prompt: the excess of NeMo-RL's token rates over its mean lengths, median."""

MEAN_TOKENS = {"reasoning": 8000, "plain": 800}
"""Sampled tokens per trajectory if a row has none: long chains of thought, and answers of base
models on maths problems (600 to 1000 tokens in Liu et al., arXiv:2503.20783, figure 5)."""

MAX_TOKENS = {"reasoning": 16384, "plain": 2048}
"""Bound of sampled tokens if a row has none."""

BATCH = {"verl docs": (512, 16), "areal": (512, 16)}
"""(prompts, samples per prompt) of frameworks and documents whose other tables state them."""

USUAL_BATCH = (128, 8)
"""(prompts, samples per prompt) of everyone else."""

SAMPLED_SHARE = 0.25
"""Share of an agent's trajectory that the policy sampled; tools wrote the rest."""

PRETRAIN_TOKENS = 4096
"""Tokens per sequence of a training row that does not say."""

_REASONING = re.compile(r"distill|qwq|qwen3|intellect|turn|swe|agent")
_MULTI_TURN = re.compile(r"turn|swe|agent")


class NotPredictable(Exception):
    """A row, or a quantity of it, cannot be predicted. The message says why."""


class Assumed:
    """Names of columns that a rule has filled."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def number(self, point: Point, column: str, value: float) -> float:
        """The row's number, or `value`, noted as an assumption."""
        if column not in point.inputs:
            self.names.append(column)
        return point.inputs.get(column, value)


def device_of(point: Point) -> Accelerator:
    """The row's accelerator: memory size and form ignored, a power limit applied."""
    text = point.text("gpu")
    if not text:
        raise NotPredictable("the row names no GPU")
    try:
        name = re.sub(r"^\s*\d+\s*[x*×]\s*|^\s*DGX\s+", "", text, flags=re.IGNORECASE)
        device = find_accelerator(re.split(r"[\s-]+\d+\s*GB?\b|\s*\(|\s+HBM|\s+NVL", name)[0])
    except UserError as error:
        raise NotPredictable(str(error)) from None
    watts = re.search(r"(\d+)(?:/\d+)?\s*W\b", text)
    return device.at_power(float(watts[1])) if watts else device


def model_of(point: Point) -> Architecture:
    """A public architecture with the row's own parameter counts, or a model of that size.

    The model is dense, unless its name or the row has fewer active parameters.
    """
    total, active = point.inputs.get("params_b"), point.inputs.get("active_b")
    known = find(point.text("model"))
    if known is None:
        named = size_in_name(point.text("model"))
        if total is None and named is None:
            raise NotPredictable("the row gives neither a known model nor a number of parameters")
        if total is None and named is not None:
            total = named[0]
            active = named[1] if active is None else active
    try:
        return with_sizes(known or dense_of_size(total or 0.0), total, active)
    except UserError as error:
        raise NotPredictable(str(error)) from None


def layout_of(point: Point, devices: float) -> Layout:
    """Parallel degrees of the trainer; a missing degree is 1."""
    tensor, context, pipeline = (
        max(1, int(point.inputs.get(f"train_{axis}", 1))) for axis in ("tp", "cp", "pp")
    )
    return Layout(devices, tensor, context, pipeline)


def trainer_engine(point: Point) -> Engine:
    """Engine of a row that measures training alone.

    Pre-training engines count as tuned, as Megatron-LM is. torchtitan is the exception: it runs
    layer by layer unless it compiles.
    """
    name = point.text("framework").lower()
    titan = "torchtitan" in name
    pretraining = re.search(r"pre-?train", point.text("workload").lower()) is not None
    tuned = "megatron-lm" in name or (pretraining and not titan)
    # The runs with tensor or 4D parallelism use torch.compile (their reports say so).
    compiled = tuned or (titan and re.search(r"compile|tp\b|tp\d|[234]d\b", name) is not None)
    return Engine(
        compiled=compiled,
        dtype="fp8" if "fp8" in point.text("precision") else "bf16",
        old_attention=titan or "attn=FA2" in point.text("notes"),
        ring_attention=titan and point.inputs.get("train_cp", 1) > 1,
        gathers="megatron" not in name,
        hides_tensor_parallel=tuned or "async tp" in name,
        interleaves=tuned or "interleaved" in name,
        loops_experts="prime-rl" in name,
    )


def rl_engine(point: Point) -> Engine:
    """Trainer of a reinforcement-learning framework. Only ZeRO-3 gathers for each micro-batch."""
    dtype = "fp8" if "fp8 train" in point.text("precision") else "bf16"
    return Engine(dtype=dtype, gathers=_is_zero(point))


def _is_zero(point: Point) -> bool:
    return re.search(r"openrlhf|deepspeed", point.text("framework").lower()) is not None


def topology_of(point: Point) -> str:
    """Topology from the column `mode`; without it, sampling and training share devices."""
    mode = point.text("mode").lower()
    if re.search(r"fully async|^async|[2-9]\d*-step", mode):
        return ASYNC
    return ONE_STEP_OFF if re.search(r"\boff\b|one-step", mode) else COLOCATED


def sampler_of(point: Point, arch: Architecture, devices: float) -> Sampler:
    """Devices that sample. A missing degree is the least at which weights fill 60 % of memory."""
    device = device_of(point)
    weight = 1.0 if re.search(r"fp8 (gen|rollout)", point.text("precision")) else 2.0
    tensor = int(point.inputs.get("gen_tp", 0))
    if not tensor:
        tensor = 1
        while arch.params_b * weight > 0.6 * device.memory_gb * tensor:
            tensor *= 2
    return Sampler(device, devices, tensor, weight)


def sequences_of(point: Point, assumed: Assumed) -> float:
    """Trajectories per step.

    `prompts_or_gbs` counts trajectories if the row has a training batch and no group size. PPO
    samples one trajectory per prompt.
    """
    origin = f"{point.text('source')} {point.text('framework')}".lower()
    prompts, samples = next((BATCH[name] for name in BATCH if name in origin), USUAL_BATCH)
    total = assumed.number(point, "prompts_or_gbs", prompts)
    if "samples_per_prompt" not in point.inputs and (
        point.text("algorithm") == "PPO" or "train_gbs" in point.inputs
    ):
        return total
    return total * assumed.number(point, "samples_per_prompt", samples)


def lengths_of(point: Point, assumed: Assumed) -> tuple[Lengths, float]:
    """Lengths of sampling, and mean tokens per trajectory that the trainer sees.

    In a row about agents, `avg_len` counts all turns with their tool outputs.
    """
    about = " ".join(point.text(name) for name in ("workload", "algorithm", "notes")).lower()
    kind = "reasoning" if _REASONING.search(f"{point.text('model')} {about}".lower()) else "plain"
    longest = assumed.number(point, "max_len", MAX_TOKENS[kind])
    mean = assumed.number(point, "avg_len", min(longest / 2, MEAN_TOKENS[kind]))
    mean = min(mean, longest)
    share = SAMPLED_SHARE if _MULTI_TURN.search(about) else 1.0
    before = PROMPT_TOKENS + mean * (1 - share)
    return Lengths(before, mean * share, longest * share), PROMPT_TOKENS + mean


TRAINING = re.compile(r"trainer only|pre-?train|\bsft\b|fine-?tun|rl training phase")
RL_STEP = re.compile(r"\brl\b|rlhf|rlvr|reinforce|\b(ppo|grpo|dapo|rloo|gspo)\b")


@dataclass(frozen=True)
class Prediction:
    """Predicted quantities of a row.

    Attributes:
        values: column of `TARGETS` -> value, in the column's unit.
        assumed: input columns that the row lacks and a rule has filled.
        refused: column -> why it is not predicted although the row is.
    """

    values: dict[str, float]
    assumed: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


def predict(point: Point, k: Constants) -> Prediction:
    """Predict a row.

    Raises:
        NotPredictable: if the row lacks its model or device, or is of an unknown kind.
    """
    if not point.published and point.wordy:
        raise NotPredictable("the published value is text, not a number")
    for column, text in point.unreadable.items():
        raise NotPredictable(f"{column} = '{text}' is not a number")
    work = point.text("workload").lower()
    if re.search(r"weight (sync|transfer|update)|refit", work.split("(")[0]):
        return _sync(point, k)
    # What a workload starts with counts more than what it mentions.
    if TRAINING.match(work) or (TRAINING.search(work) and not RL_STEP.search(work)):
        return _training(point, k)
    if RL_STEP.search(work):
        return _rl(point, k)
    raise NotPredictable(f"no rule for the workload '{point.text('workload')}'")


def _sync(point: Point, k: Constants) -> Prediction:
    pipelined = "true" in point.text("mode").lower()
    network = device_of(point).network_gb_s
    return Prediction({"sync_s": sync_seconds(model_of(point), network, pipelined=pipelined, k=k)})


def _recompute(point: Point) -> str:
    text = point.text("recompute").lower()
    if text in ("recompute", "offload", "full") or "rl training" in point.text("workload").lower():
        return "full"
    return "selective" if text else "none"


def _micro_batches(
    point: Point, layout: Layout, context: float, assumed: Assumed
) -> tuple[float, float]:
    """(sequences per micro-batch, micro-batches per replica) of a training row.

    A pipeline runs one sequence per micro-batch; `micro_batch` is then the batch of a replica. If
    it is missing too, a replica has four micro-batches per stage, which keeps the bubble small.
    Without a pipeline, a replica takes its part of a known batch at once, and gathers weights once.
    """
    batch = point.inputs.get("train_gbs", 0.0)
    if batch > 1e5:  # in tokens, not in sequences
        batch /= context
    usual = 1.0
    if layout.pipeline > 1 and not batch:
        usual = 4.0 * layout.pipeline
    elif layout.pipeline == 1 and batch:
        usual = max(1.0, batch / layout.replicas)
    size = assumed.number(point, "micro_batch", usual)
    if batch:
        return size, max(1.0, batch / (layout.replicas * size))
    return (1.0, size) if layout.pipeline > 1 else (size, 1.0)


def _training(point: Point, k: Constants) -> Prediction:
    assumed = Assumed()
    arch, device = model_of(point), device_of(point)
    layout = layout_of(point, assumed.number(point, "n_gpus", device.devices_per_node))
    engine = trainer_engine(point)
    work = point.text("workload").lower()
    adapters = "lora" in work
    context = point.inputs.get("avg_len") or assumed.number(point, "max_len", PRETRAIN_TOKENS)
    size, count = _micro_batches(point, layout, context, assumed)
    recompute = _recompute(point)
    passes = training_pass(recompute, adapters=adapters)
    seconds = pass_seconds(arch, device, layout, size * context, count, context, passes, engine, k)
    prime = "prime-rl" in point.text("framework").lower()
    if prime and "rl" in work.split(",")[-1].split():
        seconds += k.rl_micro_step_s + (0 if adapters else 2 * arch.params_b / k.publish_gb_s)
    rate = size * count * context * layout.replicas / seconds / layout.devices
    # Engines for reinforcement learning read log-probs without holding all logits.
    chunked = prime and "sft" not in work
    memory = training_gib(
        arch, layout, size * context, min(count, layout.pipeline), recompute, adapters=adapters,
        offloaded=point.text("recompute") == "Offload", chunked_head=chunked,
    )  # fmt: skip
    flops = _model_flops(point, arch, context, adapters=adapters)
    values = {
        "step_s": seconds,
        "tokens_s_gpu": rate,
        "tokens_s_total": rate * layout.devices,
        "mfu_pct": 100 * flops * rate / device.peak("bf16"),
        "tflops_gpu": flops * rate / 1e12,
        "mem_gib_gpu": memory,
    }
    if total := re.search(r"([\d.]+)T tokens", point.text("workload")):
        values["gpu_hours"] = float(total[1]) * 1e12 / rate / 3600
    return Prediction(values, tuple(assumed.names), _refused(point, ()))


def _model_flops(point: Point, arch: Architecture, context: float, *, adapters: bool) -> float:
    """FLOPs per token by the convention of the row's source.

    prime-rl counts attention without the causal mask, takes hidden / heads as the head size, and
    four products per frozen weight. Megatron-LM's examples count attention without the mask.
    """
    name = point.text("framework").lower()
    if "prime-rl" in name:
        products = (4 if adapters else 6) * arch.matmul_params
        return products + 12 * arch.layers * arch.hidden * context
    attention = 3 * arch.attention_flops(context) * (2 if name == "megatron-lm" else 1)
    return 6 * arch.matmul_params + attention


def _rl(point: Point, k: Constants) -> Prediction:
    assumed = Assumed()
    arch = model_of(point)
    if "n_gpus" not in point.inputs:
        raise NotPredictable("the row gives no number of GPUs")
    devices = point.inputs["n_gpus"]
    topology = topology_of(point)
    trainer = sampling = devices
    if topology != COLOCATED:
        trainer = assumed.number(point, "gpus_train", devices / 2)
        sampling = assumed.number(point, "gpus_rollout", devices / 2)
    sequences = sequences_of(point, assumed)
    lengths, trained = lengths_of(point, assumed)
    algorithm = point.text("algorithm").lower()
    engine = rl_engine(point)
    critic = algorithm == "ppo"
    longest = point.inputs.get("max_len", trained)
    step = RlStep(
        topology=topology,
        sampler=sampler_of(point, arch, sampling),
        layout=layout_of(point, trainer),
        engine=engine,
        sequences=sequences,
        lengths=lengths,
        trained=trained,
        packed=trained if engine.gathers else max(trained, longest),
        reference=algorithm in ("grpo", "ppo", "swe"),
        critic=critic,
    )
    phases = step_phases(arch, step, k)
    values = {
        "step_s": phases.total,
        "gen_s": phases.sample,
        "logprob_s": phases.logprob,
        "ref_s": phases.reference,
        "train_s": phases.train,
        "sync_s": phases.sync,
        "tokens_s_gpu": sequences * trained / phases.total / devices,
    }
    if steps := re.search(r"(\d+) ppo steps", point.text("workload").lower()):
        values["gpu_hours"] = phases.total * devices * int(steps[1]) / 3600
    waits = ("gen_s",) if topology == ASYNC else ()
    for column in waits:
        del values[column]
    return Prediction(values, tuple(assumed.names), _refused(point, waits))


def _refused(point: Point, waits: tuple[str, ...]) -> dict[str, str]:
    reasons = dict.fromkeys(waits, "an asynchronous step publishes the time it waited for samples")
    if "other_value" in point.published:
        reasons["other_value"] = f"no rule for '{point.text('other_name')}'"
    return reasons


FROZEN_BYTES = 4
"""fp32 weights without gradients: the base model under adapters."""

LOGIT_BYTES = 16
"""Per logit at the peak: bf16 and fp32 logits, fp32 log-softmax and gradient, bf16 gradient."""

KEPT = {"none": 1.0, "selective": 0.5, "full": 0.0}
"""Share of a layer's activations that is kept for the backward pass."""


def layer_bytes(arch: Architecture) -> float:
    """Bytes per token that autograd keeps for one layer in bf16.

    Queries, keys, values and the attention's output; inputs of two norms and the residual; gate,
    up, activation and product of the MLP. Experts add a token's input, output and its gradient for
    each expert that the token uses.
    """
    attention = (2 * arch.heads + 2 * arch.kv_heads) * arch.head_size
    routed = 3 * arch.experts_per_token * arch.hidden
    return 2 * (attention + 3 * arch.hidden + 4 * arch.mlp_width + routed)


def training_gib(
    arch: Architecture,
    layout: Layout,
    tokens: float,
    in_flight: float,
    recompute: str,
    *,
    adapters: bool,
    offloaded: bool,
    chunked_head: bool,
) -> float:
    """GiB per device at the peak of a training step, from byte counts alone: nothing is fitted.

    State: mixed-precision Adam (Rajbhandari et al., arXiv:1910.02054) with fp32 weights.
    Activations: tensors that autograd keeps for a layer with a gated MLP and FlashAttention,
    counted as in Korthikanti et al. (arXiv:2205.05198).

    Args:
        tokens: tokens per micro-batch.
        in_flight: micro-batches whose activations the first pipeline stage holds.
        recompute: none, selective or full.
        offloaded: the kept inputs of layers go to host memory.
        chunked_head: logits are never held for all tokens at once.
    """
    params = arch.params_b * 1e9
    held = FROZEN_BYTES if adapters else STATES["float32"].total
    state = params * held / layout.devices
    # Two gathered layers in bf16: the current one and the next.
    gathered = 4 * params / arch.layers / layout.tensor if layout.devices > 1 else 0.0
    local = tokens / (layout.tensor * layout.context)
    layers = arch.layers / layout.pipeline
    inputs = 0.0 if offloaded else 2 * arch.hidden * layers
    kept = layer_bytes(arch) * layers * KEPT[recompute]
    # The layer in the backward pass holds its activations and as many gradients.
    working = 2 * layer_bytes(arch)
    logits = 0.0 if chunked_head else LOGIT_BYTES * arch.vocab
    return (state + gathered + local * (in_flight * (inputs + kept) + max(working, logits))) / 2**30
