"""Predict the quantities of one row of published measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .architectures import Architecture
from .constants import Constants
from .point_inputs import (
    PRETRAIN_TOKENS,
    Assumed,
    NotPredictable,
    device_of,
    layout_of,
    lengths_of,
    model_of,
    rl_engine,
    sampler_of,
    sequences_of,
    topology_of,
    trainer_engine,
)
from .points import Point
from .rl_time import ASYNC, COLOCATED, RlStep, step_phases, sync_seconds
from .train_memory import training_gib
from .train_time import Layout, pass_seconds, training_pass

TRAINING = re.compile(r"trainer only|pre-?train|\bsft\b|fine-?tun|rl training phase")
RL_STEP = re.compile(r"\brl\b|rlhf|rlvr|reinforce|\b(ppo|grpo|dapo|rloo|gspo)\b")


@dataclass(frozen=True)
class Prediction:
    """Predicted quantities of a row.

    Attributes:
        values: column of `points.TARGETS` -> value, in the column's unit.
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
