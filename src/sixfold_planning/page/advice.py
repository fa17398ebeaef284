"""What limits a planned run and what would change it: the remarks of `sixfold plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean as mean

from sixfold.environment.pass_rate import degenerate_share, resampling_factor

from ..async_benefit import async_benefit
from ..balance import ideal_ratio, usual_split
from ..collectives import all_reduce_seconds
from ..constants import Constants
from ..decode_time import Sampler
from ..flops import RECOMPUTED, TRAINING, flops_per_token, prefill_saving, tokens_per_second
from ..freshness import BANDS, largest_staleness, replay_weight
from ..hardware import Accelerator, Cluster
from ..head_time import head_kernels, head_time
from ..memory import chunked_logits_bytes, whole_logits_peak
from ..planned_work import Inputs
from ..planner import Comparison, TopologyPlan, planned_topology, training_utilisation, weight_sync
from ..roofline import ROLES, decode_step, prefill_knee, role_limit
from ..step_time import trainer_utilisation
from ..stragglers import compare_longest
from ..sync_time import OPTIMISATIONS, cumulative_sync_seconds, sync_volume
from .layout import Rows

TRIALS = 200
"""Number of random groups from which the expected longest length is estimated."""


def limit_rows(inputs: Inputs, cluster: Cluster, plan: TopologyPlan) -> Rows:
    """What limits each role by the roofline, and the predicted share of that limit."""
    arch, device, work = inputs.arch, cluster.device, inputs.work
    peak, bandwidth = device.peak("bf16"), device.bandwidth_gb_s * 1e9
    limits = [
        f"{role} by {role_limit(role, flops_per_second=peak, bytes_per_second=bandwidth)}"
        for role in ROLES
    ]
    sampler = Sampler(device, plan.sampling_devices, plan.engine_devices, 2.0)
    batch = max(1, round(work.sequences / sampler.replicas))
    ideal = decode_step(
        weight_bytes=arch.read_params(batch) * sampler.weight_bytes,
        active_parameters=arch.matmul_params,
        sequences=batch,
        context=work.prompt_tokens + work.mean_tokens / 2,
        kv_bytes_per_token=arch.kv_bytes(),
        flops_per_second=peak * sampler.tensor,
        bytes_per_second=bandwidth * sampler.tensor,
    )
    sampled = work.sequences * work.mean_tokens / plan.phases.rollout
    train = plan.phases.trainer
    useful = training_utilisation(arch, device, work, seconds=train, devices=plan.training_devices)
    factor = RECOMPUTED if work.recompute == "full" else TRAINING
    bound = tokens_per_second(
        flops_per_token(arch.matmul_params, factor), flops_per_second=peak * plan.training_devices
    )
    knee = prefill_knee(flops_per_second=peak, bytes_per_second=bandwidth, width=2)
    return [
        ("usual limits", ", ".join(limits)),
        (
            "sampling",
            f"{sampled:,.0f} tokens/s; the roofline allows"
            f" {ideal.tokens_per_second * sampler.replicas:,.0f} with all sequences running"
            f" ({ideal.seconds * 1e3:.1f} ms per token)",
        ),
        (
            "training",
            f"{work.sequences * work.trained / train:,.0f} tokens/s; the peak allows {bound:,.0f};"
            f" {useful:.0%} of the peak is useful work",
        ),
        *_head_rows(inputs, device),
        ("prefill", f"limited by compute above {knee:,.0f} tokens in one pass"),
    ]


def _head_rows(inputs: Inputs, device: Accelerator) -> Rows:
    """The output head as the recipe computes it, and from whole logits.

    Empty if whole logits are less than a hundredth of the memory.
    """
    arch, work = inputs.arch, inputs.work
    tokens, chunk = max(1, round(work.packed)), inputs.plan.recipe.trainer.logprob_chunk
    whole = whole_logits_peak(tokens=tokens, vocabulary=arch.vocab, width=2)
    if whole < 1e7 * device.memory_gb:
        return []

    def shown(tokens_at_once: int) -> str:
        found = head_time(
            head_kernels(
                tokens=tokens,
                vocabulary=arch.vocab,
                hidden=arch.hidden,
                width=2,
                chunk=tokens_at_once,
                trained=not work.adapters,
            ),
            flops_per_second=device.peak("bf16"),
            bytes_per_second=device.bandwidth_gb_s * 1e9,
        )
        peak = whole
        if tokens_at_once:
            peak = chunked_logits_bytes(
                tokens=tokens,
                vocabulary=arch.vocab,
                token_chunk=tokens_at_once,
                vocabulary_chunk=arch.vocab,
                width=2,
            )
        return (
            f"{found.flops / 1e12:.1f} TFLOP and {found.moved / 1e9:.1f} GB, at least"
            f" {found.seconds * 1e3:.1f} ms ({found.memory_seconds / found.seconds:.0%} limited by"
            f" memory), {peak / 1e9:.1f} GB of tables"
        )

    text = f"{tokens:,} tokens from whole logits: {shown(0)}"
    if chunk:
        text += f"; in chunks of {chunk:,}: {shown(chunk)}"
    return [("output head", text)]


def group_rows(inputs: Inputs, rates: Sequence[float], variation: float) -> Rows:
    """Groups without a gradient, shared prompts, and the wait for the longest sample.

    Args:
        rates: pass rates of tasks, or one for all.
        variation: coefficient of variation of the lengths in a group.
    """
    work = inputs.work
    wasted, factor = degenerate_share(rates, work.samples), resampling_factor(rates, work.samples)
    measured = f"the measured pass rates of {len(rates):,} tasks, on average"
    of = "a pass rate of" if len(rates) == 1 else measured
    refill = f"{factor:.2f} x as much sampling" if factor < 1e6 else "endless sampling"
    share = work.mean_tokens / work.prompt_tokens
    longest = compare_longest(variation=variation, samples=work.samples, trials=TRIALS, seed=0)
    return [
        (
            "equal rewards",
            f"{wasted:.1%} of groups at {of} {mean(rates):.3g} have no gradient;"
            f" replacing them (dynamic sampling) costs {refill}",
        ),
        (
            "shared prompt",
            f"prefill {work.samples} x less; the published formula K / (1 + K G / P) gives"
            f" {prefill_saving(work.samples, share):.2f} (below 1: completions dominate)",
        ),
        (
            "longest sample",
            f"{longest.exact:.1f} x the mean of a group ({longest.sampled:.1f} ±"
            f" {longest.standard_error:.1f} in {TRIALS} random groups; the common bound is"
            f" {longest.excess:.0%} higher)",
        ),
    ]


def sensitivity_rows(
    inputs: Inputs, cluster: Cluster, k: Constants, together: TopologyPlan
) -> Rows:
    """Step time of the colocated topology if one assumption is off by a third."""
    work, rows = inputs.work, []
    mean = min(work.longest_tokens, 4 / 3 * work.mean_tokens)
    cases = (
        ("as assumed", work, k),
        ("longer completions", replace(work, mean_tokens=mean), k),
        ("longer prompts", replace(work, prompt_tokens=4 / 3 * work.prompt_tokens), k),
        ("slower arithmetic", work, replace(k, eager=k.eager / 1.5, tuned=k.tuned / 1.5)),
        ("lower bandwidths", work, replace(k, bandwidth=k.bandwidth * 2 / 3)),
        (
            "slower kernel launches",
            work,
            replace(
                k, decode_layer_s=k.decode_layer_s * 4 / 3, layer_pass_s=k.layer_pass_s * 4 / 3
            ),
        ),
    )
    for name, changed, constants in cases:
        if constants is not k and cluster.device.measured is not None:
            continue  # the constants have no effect on a measured device
        plan = planned_topology(
            inputs.arch,
            cluster.device,
            changed,
            constants,
            sampling=cluster.count,
            training=cluster.count,
            topology="colocated",
            engine_devices=together.engine_devices,
        )
        rows.append((name, f"{plan.step.seconds:.2f}"))
    return rows


def sync_rows(inputs: Inputs, cluster: Cluster, plan: TopologyPlan, k: Constants) -> Rows:
    """Operations of a weight sync between two pools, and what would shorten it."""
    arch, device = inputs.arch, cluster.device
    operations = weight_sync(
        arch,
        device,
        trainer_ranks=plan.training_devices,
        devices=cluster.count,
        sent_width=inputs.work.sent_width,
        k=k,
    )
    total = sum(operations.values())
    narrow = inputs.work.sent_width < 2
    offered = [name for name in OPTIMISATIONS if name != "fp8" or not narrow]
    shorter = cumulative_sync_seconds(total, offered)
    network = device.bandwidth_between(cluster.count)
    volume = sync_volume(
        arch.params_b * 1e9,
        width=inputs.work.sent_width,
        copies=max(1, plan.sampling_devices // plan.engine_devices),
        bytes_per_second=network,
        step_seconds=plan.step.seconds,
    )
    gradients = all_reduce_seconds(
        4e9 * arch.params_b,
        ranks=plan.training_devices,
        bytes_per_second=network * k.bandwidth,
        latency=0,
    )
    shown = " + ".join(f"{name} {value:.2g}" for name, value in operations.items() if value)
    return [
        ("weight sync", f"{shown} = {total:.2g} s"),
        (
            "shorter",
            ", then ".join(f"{name} {value:.2g} s" for name, value in shorter.items())
            + " (published shares; overlap makes samples one version older)",
        ),
        ("verdict", f"{volume.tax:.0%} of a step if copies go one by one: {volume.verdict}"),
        ("gradients", f"their sum over the trainer's devices takes {gradients:.2g} s"),
    ]


def split_rows(cluster: Cluster, found: Comparison, inputs: Inputs) -> Rows:
    """How to divide devices between sampling and training."""
    assert found.split is not None
    together, work = found.topologies["colocated"].phases, inputs.work
    sampled = work.sequences * work.mean_tokens
    trained = work.sequences * work.trained
    ratio = ideal_ratio(
        rollout_tokens=sampled,
        trainer_tokens=trained,
        rollout_rate=sampled / together.rollout / cluster.count,
        trainer_rate=trained / (together.reference + together.trainer) / cluster.count,
    )
    rollout, trainer = usual_split(cluster.count)
    return [
        (
            "split",
            f"{found.split.rollout} sample and {found.split.trainer} train"
            f" ({found.split.ratio:.1f} to 1, ideally {ratio:.2f} to 1); a rule of thumb is"
            f" {rollout} and {trainer}",
        )
    ]


def async_rows(cluster: Cluster, apart: TopologyPlan) -> Rows:
    """Whether asynchronous training is worth its staleness."""
    nodes = -(-cluster.count // cluster.device.devices_per_node)
    advice = async_benefit(
        rollout_seconds=apart.phases.rollout,
        trainer_seconds=apart.phases.reference + apart.phases.trainer,
        nodes=nodes,
    )
    high = f" to {advice.high:g}" if advice.high else " or more"
    budget = BANDS["async"].usable
    oldest = largest_staleness(budget)
    return [
        ("async", f"{advice.verdict}: {advice.reason} Usual speed-up: {advice.low:g}{high}."),
        (
            "staleness",
            f"at most {oldest} versions keep clipping below {budget:.0%}; a replay buffer with"
            f" decay 0.95 draws such a sample {replay_weight(oldest, 0.95):.2f} x as often",
        ),
        (
            "trainer busy",
            f"{trainer_utilisation(apart.phases, apart.step):.0%} of a step with two pools",
        ),
    ]
