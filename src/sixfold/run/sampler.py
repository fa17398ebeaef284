"""The engine of a run and its weight sync."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..backends.samplers import Samplers
from ..batch import collate
from ..engine.engine import Engine
from ..engine.routes import RecordedModel
from ..engine.speculative import Speculation
from ..errors import UserError
from ..event_loop import EventLoop
from ..model.causal_lm import CausalLM
from ..model.loading import Policy
from ..processes.deadline import Deadline
from ..ranks import ALONE, Ranks
from ..recipe.schema import (
    EngineBackend,
    MoeConfig,
    ParallelConfig,
    Recipe,
    SamplersApart,
    SyncConfig,
    VllmBackend,
)
from ..recipe.schema import Speculation as SpeculationConfig
from ..renderer.renderer import Renderer
from ..report.numbers import percent
from ..rollout.engine_generator import EngineGenerator
from ..rollout.generator import Generator
from ..rollout.scheduled import ScheduledGenerator
from ..sync.adapter import AdapterSync
from ..sync.quantise import quantised_share
from ..sync.ranks import Probe, RanksSync
from ..sync.sync import CopySync, GatheredSync, SharedSync
from ..sync.versioned import VersionedSync, probe_tokens
from ..trainer.logprobs import PolicyRoot, Scoring, score_tables
from ..trainer.parity import parity_limits
from ..trainer.routing import make_routing
from ..trainer.sharded import Shards, shard_policy
from ..trainer.whole_weights import WholeWeights
from ..types import Group, Task, Trajectory
from .embedded import embedded_engine
from .kv_size import kv_tokens
from .remote_engine import first_sync, start_remote_engine, start_vllm_of_ranks
from .samplers import start_samplers
from .sampling_model import load_draft

Sync = SharedSync | AdapterSync | CopySync | VersionedSync | GatheredSync | RanksSync
"""Weight sync of a run."""


def engine_and_sync(
    recipe: Recipe,
    policy: Policy,
    renderer: Renderer,
    longest: int,
    autocast: torch.dtype | None,
    ending: ExitStack,
    notes: list[str],
    loop: EventLoop,
    generator: Generator | None = None,
    ranks: Ranks = ALONE,
    replaying: bool = False,
) -> tuple[Engine | Generator, Sync, Shards | None]:
    """Create the engine and its weight sync. With several ranks, shard the policy.

    Args:
        recipe: the whole run.
        policy: the trainer's model.
        renderer: decodes completions.
        longest: longest sequence, in tokens.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        ending: receives the callback that ends an engine in another process.
        notes: receives messages for the user.
        loop: event loop in which generators are used.
        generator: replaces the recipe's engine, and is never synced.
        ranks: the ranks of the run.
        replaying: the sampler will follow a recorded schedule.

    Returns:
        The engine, its sync, and the sharded policy, or None with one rank.
    """
    if generator is not None:
        sync = VersionedSync(policy.model, generator, 1, math.inf, longest, wait=loop.run)
        return generator, sync, None
    backend, wait = recipe.rollout.backend, loop.run
    if isinstance(backend, VllmBackend) and ranks.size > 1:
        run = recipe.run
        of_run = recipe.placement, backend, recipe.engine, run.precision, run.silence_s
        shared = start_vllm_of_ranks(*of_run, policy, renderer, longest, ending, ranks)
        shards = sharded_policy(recipe.moe, recipe.parallel, policy, autocast, ranks)
        assert shards is not None
        limit = parity_limits(recipe.run.precision, str(policy.model.device), outside=True).mean
        probe = Probe(probe_tokens(policy.model, longest), partial(token_logp, shards), limit)
        outside = RanksSync(_gathered(policy), shared, ranks.agree, wait, probe=probe)
        first_sync(outside, backend.kind)
        return shared, outside, shards
    if not isinstance(backend, EngineBackend):
        remote = start_remote_engine(recipe, backend, policy, renderer, longest, ending, wait)
        return *remote, None
    if recipe.engines_apart:
        placement, silence_s = recipe.placement, recipe.run.silence_s
        apart: Generator
        elsewhere = placement if isinstance(placement, SamplersApart) and placement.apart else None
        if elsewhere and not replaying:
            tokens = recipe.engine.kv_tokens
            if not tokens and policy.model.device.type != "cpu":
                raise UserError(
                    f"placement.kind = '{recipe.placement.kind}' on a GPU needs engine.kv_tokens:"
                    " each process holds the weights once more, and may share a GPU with others"
                )
            tokens = tokens or kv_tokens(recipe, policy, longest, notes, None)
            settings = elsewhere, recipe.engine, tokens, policy, renderer, autocast, silence_s
            apart = start_samplers(*settings, ending, ranks)
        else:
            threads = torch.get_num_threads()
            ending.callback(torch.set_num_threads, threads)
            # Beside the trainer, each computes with half of the threads. A replay has as many as
            # the recorded run.
            half = max(1, threads // 2)
            own = elsewhere.threads if elsewhere else half
            torch.set_num_threads(own)
            engine = make_engine(recipe, policy, longest, autocast, notes, own=True)
            local = EngineGenerator(engine, renderer, deadline=Deadline("the engine", silence_s))
            torch.set_num_threads(threads if elsewhere else half)
            apart = ScheduledGenerator(local) if replaying else local
            ending.callback(apart.close)
        if ranks.size > 1:
            shards = sharded_policy(recipe.moe, recipe.parallel, policy, autocast, ranks)
            forget = apart.forget if isinstance(apart, Samplers) else lambda: None
            gathered = RanksSync(_gathered(policy), apart, ranks.agree, loop.run, forget)
            gathered.refresh()
            return apart, gathered, shards
        limit = parity_limits(recipe.run.precision, str(policy.model.device), outside=False).mean
        named = VersionedSync(
            policy.model, apart, 1, limit, longest, policy.lora, loop.run, renames=False
        )
        named.refresh()
        return apart, named, None
    own = ranks.size > 1 and policy.lora is None
    engine = make_engine(recipe, policy, longest, autocast, notes, own=own)
    shards = sharded_policy(recipe.moe, recipe.parallel, policy, autocast, ranks)
    if own:
        whole = partial(WholeWeights, policy.model)
        return engine, GatheredSync(whole, engine, policy.model.device.type == "cpu"), shards
    return engine, _sync(recipe.sync, policy, engine, notes), shards


def _gathered(policy: Policy) -> Callable[[], Mapping[str, Tensor]]:
    """Returns the weights of a sharded policy by name, with an adapter merged in."""
    return policy.lora.merged if policy.lora else partial(WholeWeights, policy.model)


def token_logp(shards: Shards, tokens: Sequence[int]) -> list[float]:
    """Log-probs of all tokens but the first. All ranks must call this."""
    count, first = len(tokens) - 1, [*tokens[:1]]
    completion = tokens[1:], [0.0] * count, [0] * count
    one = Trajectory.one_turn("probe", 0, first, *completion, "length")
    batch = collate([Group(Task("probe", ""), [one])], scored=False).to(shards.root.model.device)
    scoring = Scoring(autocast=shards.autocast)
    scores, _ = score_tables(shards.root, batch, scoring, len(tokens), False, shards.ranks)
    return list(scores[0, 1:].tolist())


def sharded_policy(
    moe: MoeConfig,
    parallel: ParallelConfig,
    policy: Policy,
    autocast: torch.dtype | None,
    ranks: Ranks,
) -> Shards | None:
    """Shard the policy over the ranks, in place. None with one rank.

    Of a policy with an adapter, only the adapter is sharded. The engine of every rank needs all
    weights of the base, so sharing them with the trainer takes the least memory.

    Args:
        moe: how the model's experts are routed.
        parallel: how the ranks divide the work.
        policy: the trainer's model.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        ranks: the ranks of the run.
    """
    if ranks.size == 1:
        return None
    root = PolicyRoot(policy.model, make_routing(policy.model, moe))
    base = policy.lora.base.parameters() if policy.lora else ()
    return shard_policy(root, ranks, parallel, autocast, base)


def _sync(
    config: SyncConfig, policy: Policy, engine: Engine, notes: list[str]
) -> SharedSync | AdapterSync | CopySync:
    """Weight sync of an engine in the trainer's process."""
    if config.kind == "shared":
        lora = policy.lora
        return AdapterSync(lora, engine) if lora else SharedSync(policy.model, engine)
    sync = CopySync(policy.model, engine, config.every, config.kind, policy.lora)
    if policy.lora or config.quantised:
        sync.refresh()  # the engine starts with a copy of the base, which is not quantised
    if config.quantised:
        share = quantised_share(policy.plain)
        notes.append(
            f"the engine samples from rounded weights: {percent(share, 0)} of them are rounded to"
            f" {config.kind} precision. This saves neither memory nor time."
        )
    return sync


def make_engine(
    recipe: Recipe,
    policy: Policy,
    longest: int,
    autocast: torch.dtype | None,
    notes: list[str] | None = None,
    *,
    own: bool = False,
) -> Engine:
    """Create the engine on the policy's own module, or on a copy if the recipe does not share it.

    Args:
        recipe: the whole run.
        policy: the trainer's model.
        longest: longest sequence, in tokens.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        notes: receives messages for the user.
        own: copy the module even if the recipe shares it: it is about to be sharded.

    Raises:
        UserError: for CUDA graphs without a GPU, or if memory does not suffice for one sequence.
    """
    config = recipe.engine
    model = policy.plain
    if config.cuda_graphs == "on" and model.device.type != "cuda":
        raise UserError(
            f"engine.cuda_graphs = 'on' needs a GPU, but the model is on {model.device}: set 'auto'"
        )
    if own or recipe.sync.kind != "shared":
        model = copy.deepcopy(model).requires_grad_(False)
    speculation, draft = _speculation(config.speculation, recipe.run.precision, policy, longest)
    routing = make_routing(model, recipe.moe) if recipe.moe.routing != "free" else None
    return embedded_engine(
        CausalLM(model) if routing is None else RecordedModel(CausalLM(model), routing.routers),
        config,
        config.kv_tokens
        or kv_tokens(recipe, policy, longest, notes if notes is not None else [], draft),
        autocast,
        speculation,
    )


def _speculation(
    config: SpeculationConfig, precision: str, policy: Policy, longest: int
) -> tuple[Speculation | None, PreTrainedModel | None]:
    """Speculation of the recipe, and its draft model if it has one.

    Raises:
        UserError: if the draft model does not fit the policy.
    """
    if config.kind == "ngram":
        speculation = Speculation(config.tokens, None, config.shortest, config.longest)
        return speculation, None
    if config.kind == "draft":
        draft = load_draft(config.path, policy, precision, longest, "engine.speculation.path")
        return Speculation(config.tokens, CausalLM(draft)), draft
    return None, None
