"""What a row of published measurements says about its hardware, model and workload.

A column that is missing is filled by one of the rules below, and the rule's name is noted as an
assumption. A row without a model, a size or a known device is not predictable.
"""

from __future__ import annotations

import re

from ..errors import UserError
from .architectures import Architecture, dense_of_size, find, size_in_name, with_sizes
from .decode_time import Lengths, Sampler
from .hardware import Accelerator, find_accelerator
from .points import Point
from .rl_time import ASYNC, COLOCATED, ONE_STEP_OFF
from .train_time import Engine, Layout

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
        known = dense_of_size(total or 0.0)
    return with_sizes(known, total, active)


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
