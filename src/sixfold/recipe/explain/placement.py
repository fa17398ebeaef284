"""Explain where samplers run, what flows between them and the trainer, and how old samples get."""

from __future__ import annotations

from ...staleness import largest_age, window_groups
from ..plan import Plan
from ..schema import ProcessPlacement, RayPlacement, SamplersApart
from .fact import UNKNOWN, Fact, bytes_text

TOKEN_BYTES = 16
"""A sampled token between processes: its id, its log-prob and its version, pickled."""


def placement_facts(plan: Plan) -> list[Fact]:
    """Facts about samplers apart from the trainer. Empty if there are none."""
    placement, rollout = plan.recipe.placement, plan.recipe.rollout
    facts = []
    if isinstance(placement, RayPlacement) and placement.ranks > 1:
        facts += _of_ranks(plan, placement)
    elif isinstance(placement, SamplersApart):
        who = _processes(placement.samplers)
        if isinstance(placement, ProcessPlacement) and placement.devices:
            several = "s" if "," in placement.devices else ""
            who += f" (of each rank) on the GPU{several} {placement.devices}"
        through = "loopback only: pipes and /dev/shm"
        if isinstance(placement, RayPlacement):
            who += f" on {placement.address or 'a Ray cluster of this machine'}"
            through = "Ray: calls of actors and its object store"
        facts += [
            Fact(
                "placement",
                f"the trainer's process, and {who} with"
                f" {'vLLM' if rollout.backend.kind == 'vllm' else 'an engine'} and a copy of the"
                " weights each,"
                f" {placement.threads} CPU thread{'s' if placement.threads > 1 else ''} each;"
                " rewards and tools run beside the trainer",
                f"placement.kind = {placement.kind}; every task stays with one process",
            ),
            Fact("flows", _flows(plan, str(placement.samplers)), through),
        ]
    elif rollout.staleness and rollout.backend.kind == "engine":
        facts += [
            Fact(
                "placement",
                "the engine has a copy of the weights and a thread in the trainer's process; each"
                " computes with half of the CPU threads",
                "placement.kind = local with rollout.staleness > 0",
            )
        ]
    if rollout.staleness:
        per_step, bound = rollout.prompts_per_step, rollout.staleness
        window = window_groups(per_step, bound, rollout.window)
        facts += [
            Fact(
                "staleness",
                f"at most {(bound + 1) * per_step} groups are open, a step takes finished ones"
                f" among the {window} oldest, so a group is at most"
                f" {largest_age(per_step, bound, window)} steps old when it is trained",
                "staleness + ceil((window - 1) / prompts_per_step), see docs/topologies.md",
            ),
            _new_weights(rollout.backend.kind, plan.recipe.engine.update_kv),
        ]
    if (replay := plan.recipe.replay).share:
        facts.append(
            Fact(
                "replay",
                f"about {100 * replay.share:.0f}% of a step's groups were new up to"
                f" {replay.max_age} step{'s' if replay.max_age > 1 else ''} before",
                "replay.share and replay.max_age, see docs/topologies.md",
            )
        )
    return facts


def _of_ranks(plan: Plan, placement: RayPlacement) -> list[Fact]:
    count, own = placement.samplers, "its checks beside it; it samples itself"
    beside = f"{_processes(count)} that sample, and checks, beside it"
    if plan.recipe.rollout.backend.kind == "vllm":
        beside = f"checks beside it; those of a machine share {_processes(count)} with vLLM"
    who = Fact(
        "placement",
        f"{placement.ranks} trainer ranks on {placement.address or 'a Ray cluster of this machine'}"
        f", each with {beside if count else own}",
        "placement.kind = ray, placement.ranks; each rank samples its share of the tasks",
    )
    through = "all ranks gather them, and the first of each machine writes a file in memory there"
    flows = Fact("flows", _flows(plan, "the samplers of each machine"), through)
    return [who, flows] if count else [who]


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _new_weights(backend: str, update_kv: str) -> Fact:
    """What new weights do with running sequences."""
    if backend == "sglang":
        return Fact("new weights", "wait until running requests have ended", "SGLang's rule")
    kept = {"engine": update_kv, "vllm": "recomputed"}.get(backend, "kept")
    where = "engine.update_kv" if backend == "engine" else f"rollout.backend.kind = {backend}"
    return Fact("new weights", f"reach running sequences, whose keys and values are {kept}", where)


def _flows(plan: Plan, readers: str) -> str:
    size, recipe = plan.model.size, plan.recipe
    halved = recipe.rollout.backend.kind == "vllm" and recipe.run.precision == "bfloat16"
    weights = UNKNOWN if size is None else bytes_text((2 if halved else 4) * size.parameters)
    tokens = plan.trajectories * plan.recipe.episode_tokens
    return (
        f"after every step {weights} of weights, read by {readers}; at most"
        f" {bytes_text(TOKEN_BYTES * tokens)} of samples a step ({plan.trajectories} trajectories"
        f" of {plan.recipe.episode_tokens} tokens)"
    )
