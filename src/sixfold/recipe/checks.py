"""Settings of several sections that contradict each other. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec

from ..algorithm.method import Method
from ..environment.episodes import library_of
from ..environment.registry import EPISODES
from ..errors import UserError
from ..staleness import replayed_groups
from ..steps import check_steps
from .dump import toml_literal
from .reward_models import PRM, VERIFIER, is_address, is_implicit, listed_models, reward_model_paths
from .schema import (
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    PrmConfig,
    ProcessPlacement,
    ProcessScoringConfig,
    RayPlacement,
    Recipe,
    ReferenceConfig,
    ReplayConfig,
    RewardScoringConfig,
    RolloutConfig,
    SglangBackend,
    SixfoldBackend,
    TrainerConfig,
    VllmBackend,
)
from .schema.backend import Backend


def check_lora(recipe: Recipe, method: Method) -> None:
    """Refuse settings that contradict `model.lora`.

    Raises:
        UserError: names the setting and the remedy.
    """
    lora = recipe.model.lora
    if not lora.rank:
        return
    if lora.base != "float32" and recipe.run.precision != "bfloat16":
        raise UserError(
            f"model.lora.base = '{lora.base}' needs forward passes in bfloat16: set run.precision ="
            " 'bfloat16', or model.lora.base = 'float32'"
        )
    outside = recipe.rollout.backend.kind != "engine"
    if lora.base == "nf4" and (outside or recipe.sync.kind != "shared"):
        setting, value, remedy = "sync.kind", str(recipe.sync.kind), "shared"
        if outside:
            setting, value, remedy = "rollout.backend.kind", recipe.rollout.backend.kind, "engine"
        raise UserError(
            f"model.lora.base = 'nf4' stores the base in 4 bits, but {setting} = '{value}' gives"
            f" the sampler merged weights of its own: set {setting} = '{remedy}', or"
            " model.lora.base = 'bfloat16'"
        )
    if lora.dora and not recipe.samples_apart:
        raise UserError(
            "model.lora.dora = true rescales the weights of the base, so the engine needs merged"
            " weights of its own: set sync.kind = 'copy'"
        )
    own = recipe.reference
    if method.needs_reference and own.placement == "worker" and not own.path:
        raise UserError(
            "reference.placement = 'worker' would hold a second copy of the base. With"
            " model.lora.rank > 0 the reference is the base itself: set 'inline' or 'fused'"
        )


def check_sections(recipe: Recipe, method: Method) -> None:
    """Refuse settings that have no effect, or that cannot work, together with others.

    Raises:
        UserError: names the setting and the remedy.
    """
    rank, precision = recipe.model.lora.rank, recipe.run.precision
    lora = 0 if recipe.samples_apart else rank
    _check_eval(recipe.eval)
    _check_prm(recipe.prm, recipe.environment.prm, recipe.sample.label_ends)
    _check_prm_rewards(recipe.environment, recipe.data, recipe.sample.search.scorer)
    _check_evaluated("checkpoint.keep_best", recipe.checkpoint.keep_best, recipe.eval, recipe.data)
    for name in ("patience", "target_accuracy"):
        _check_evaluated(f"run.{name}", getattr(recipe.run, name), recipe.eval, recipe.data)
    _check_truncation(recipe.rollout.top_k, method)
    _check_branches(recipe.rollout, recipe.environment.episode)
    _check_max_failures(recipe.rollout, recipe.environment.error_budget)
    if recipe.data.whole_steps:
        _check_whole_steps(recipe.rollout, recipe.replay)
    _check_graphs(recipe.engine, recipe.rollout, recipe.moe.routing, lora=lora)
    _check_backend(recipe)
    check_placement(recipe, method)
    _check_precision(recipe.trainer, rank, precision)
    _check_reference(recipe.reference, rank, precision)


def check_reward_models(stages: Sequence[EnvironmentConfig]) -> None:
    """Refuse settings of reward models that none of the rewards reads.

    Args:
        stages: [environment] of each stage, or of the recipe. A setting that one stage reads may
            stand in others too.

    Raises:
        UserError: names the setting, and the rewards that would read it.
    """
    default = RewardScoringConfig()
    unread = [_unread(config) for config in stages]
    read = {
        (name, value)
        for config, wrong in zip(stages, unread, strict=True)
        for name, value in config.reward_model
        if name not in wrong
    }
    for config, wrong in zip(stages, unread, strict=True):
        for name, needed in wrong.items():
            value = getattr(config.reward_model, name)
            if value != getattr(default, name) and (name, value) not in read:
                raise UserError(
                    f"environment.reward_model.{name} = {toml_literal(value)} has no effect without"
                    f" {needed} among environment.rewards"
                )


def _unread(config: EnvironmentConfig) -> dict[str, str]:
    """Settings of reward models that no reward reads, and the reward that would."""
    paths = [path for name in config.rewards for path in reward_model_paths(name)]
    served = [path for path in paths if is_address(path)]
    here = len(served) < len(paths)
    folder = "a reward model in a folder"
    wrong: dict[str, str] = {}
    if not any(len(reward_model_paths(name)) > 1 for name in config.rewards):
        wrong["std_factor"] = "several reward models (reward_model:A,B)"
    if not any(reward_model_paths(n) and not n.startswith(PRM) for n in config.rewards):
        wrong["limit"] = "a reward model"
    if not served:
        wrong["retries"] = "a reward model that is served (reward_model:http://...)"
    if not served and config.reward_model.placement == "inline":
        wrong["timeout_s"] = "placement = 'worker' or a reward model that is served"
    if not any(reward_model_paths(n) and not n.startswith(PRM) for n in config.rewards) or not here:
        wrong["placement"] = folder
    if served and not here:
        wrong |= dict.fromkeys(("device", "precision", "max_tokens"), folder)
    return wrong


def _check_eval(config: EvalConfig) -> None:
    if config.samples > 1 and config.temperature == 0:
        raise UserError(
            f"eval.samples = {config.samples} has no effect at eval.temperature = 0: every"
            " sample is the same greedy answer. Set eval.temperature > 0 or eval.samples = 1"
        )


def _check_evaluated(name: str, value: float, config: EvalConfig, data: DataConfig) -> None:
    if value and not (config.every and (data.heldout or data.heldout_splits)):
        raise UserError(
            f"{name} = {value:g} needs held-out evaluations during training: set"
            f" eval.every and data.heldout, or {name} = 0"
        )


def _check_graphs(engine: EngineConfig, rollout: RolloutConfig, routing: str, lora: int) -> None:
    """Refuse CUDA graphs where every decode step would run without them.

    Args:
        rollout: says who samples.
        routing: `moe.routing`.
        lora: rank of an adapter that the engine adds. 0: there is none.
    """
    if engine.cuda_graphs != "on" or rollout.backend.kind != "engine":
        return
    if routing != "free":
        raise UserError(
            f"engine.cuda_graphs = 'on' has no effect with moe.routing = '{routing}': a captured"
            " forward pass cannot record the experts of its tokens. Use engine.cuda_graphs ="
            " 'auto', or moe.routing = 'free'"
        )
    if lora:
        raise UserError(
            f"engine.cuda_graphs = 'on' has no effect with model.lora.rank = {lora}: the engine"
            " adds the adapter without graphs. Use engine.cuda_graphs = 'auto', or sync.kind ="
            " 'copy', which merges the adapter"
        )


def _check_branches(rollout: RolloutConfig, episode: str) -> None:
    """Refuse branches that would never part, or that would change the number of samples."""
    if rollout.branches == 1:
        return
    if not episode:
        raise UserError(
            f"rollout.branches = {rollout.branches} shares the first turns of an episode, but"
            " environment.episode is not set. Set it, or use rollout.branches = 1"
        )
    fixed = episode in EPISODES and not EPISODES.row(episode).copyable
    if fixed or library_of(episode):
        raise UserError(
            f"rollout.branches = {rollout.branches} copies episodes, but those of"
            f" environment.episode = {episode!r} cannot be copied. Use rollout.branches = 1"
        )
    if rollout.branch_turn >= rollout.max_turns:
        raise UserError(
            f"rollout.branch_turn = {rollout.branch_turn} is never reached: an episode ends after"
            f" rollout.max_turns = {rollout.max_turns} replies. Lower it, or raise"
            " rollout.max_turns"
        )
    for name in ("samples_per_prompt", "oversample"):
        if getattr(rollout, name) % rollout.branches:
            raise UserError(
                f"rollout.{name} = {getattr(rollout, name)} must be a multiple of rollout.branches"
                f" = {rollout.branches}, so that every sample has a trunk to share. Change one of"
                " them"
            )


def _check_max_failures(rollout: RolloutConfig, error_budget: float) -> None:
    """Refuse an error budget that ends the run at the first prompt that fails."""
    if rollout.max_failures and error_budget * rollout.prompts_per_step < 1:
        raise UserError(
            f"rollout.max_failures = {rollout.max_failures} sets prompts aside that fail, but"
            f" environment.error_budget = {error_budget:g} ends the run at the first of"
            f" rollout.prompts_per_step = {rollout.prompts_per_step}. Set it to at least"
            f" {math.ceil(1e4 / rollout.prompts_per_step) / 1e4:g}, or remove rollout.max_failures"
        )


def _check_whole_steps(rollout: RolloutConfig, replay: ReplayConfig) -> None:
    """Refuse settings that bring groups of other steps, and so of other sources, into a step."""
    for setting, value in (
        ("rollout.staleness", rollout.staleness),
        ("rollout.max_failures", rollout.max_failures),
        ("replay.share", replay.share),
    ):
        if value:
            raise UserError(
                f"data.whole_steps keeps the sources of steps apart, but {setting} = {value:g}"
                f" mixes groups of several steps. Set {setting} = 0, or use algorithm.whiten ="
                " 'source'"
            )


def _check_truncation(top_k: int, algorithm: Method) -> None:
    if top_k == 1:
        raise UserError(
            "rollout.top_k = 1 leaves only one token: its log-prob is 0 for all weights, so"
            " there is no gradient. Use at least 2, or 0 for all tokens"
        )
    if top_k and algorithm.entropy_target >= math.log(top_k):
        raise UserError(
            f"algorithm.entropy_target = {algorithm.entropy_target:g} nats cannot be reached:"
            f" with rollout.top_k = {top_k} the entropy is at most ln {top_k} ="
            f" {math.log(top_k):.3g}. Lower it, or raise rollout.top_k"
        )


def _check_backend(recipe: Recipe) -> None:
    """Refuse settings that an engine in another process does not support."""
    r = recipe.rollout
    backend = r.backend.kind
    if backend == "engine":
        return
    if recipe.sync.quantised:
        raise UserError(
            f"sync.kind = '{recipe.sync.kind}' rounds the embedded engine's weights, but"
            f" rollout.backend.kind = '{backend}' samples elsewhere. Use rollout.backend.kind ="
            " 'engine', or sync.kind = 'copy'"
        )
    unused = _only_embedded(recipe.engine, recipe.moe.routing)
    if backend in ("sglang", "sixfold"):
        unused += _options_of_the_server(recipe.engine)
    for key, value, default in unused:
        if value != default:
            raise UserError(
                f"{key} = {toml_literal(value)} has no effect with rollout.backend.kind ="
                f" '{backend}'. Remove it, or use rollout.backend.kind = 'engine'"
            )
    if isinstance(r.backend, SglangBackend | SixfoldBackend):
        urls = [url.rstrip("/") for url in (r.backend.url, *r.backend.replicas)]
        if twice := next((url for url in urls if urls.count(url) > 1), ""):
            raise UserError(
                f"rollout.backend.replicas: {twice} is named twice, with rollout.backend.url. Name"
                " each server once"
            )
        if (r.backend.replicas or r.backend.restarts) and recipe.sync.kind != "shared":
            raise UserError(
                f"sync.kind = '{recipe.sync.kind}' does not work with rollout.backend.replicas or"
                " restarts: servers get new weights only, after every step. Set sync.kind ="
                " 'shared'"
            )
    elif isinstance(r.backend, VllmBackend) and isinstance(recipe.placement, ProcessPlacement):
        _check_gpus(r.backend, recipe.placement.samplers)
        if recipe.placement.whole_every > 1:
            raise UserError(
                f"placement.whole_every = {recipe.placement.whole_every}: vLLM reads whole files"
                " only. Set it to 1, or rollout.backend.kind = 'engine'"
            )
    if backend != "sixfold" and (r.top_p < 1 or r.top_k or r.min_p):
        raise UserError(
            f"rollout.top_p, top_k and min_p: rollout.backend.kind = '{backend}' does not report"
            " which tokens it kept, so the trainer cannot score them. Switch them off, or use"
            " rollout.backend.kind = 'engine'"
        )


def _check_gpus(backend: VllmBackend, samplers: int) -> None:
    """Refuse a list of GPUs that cannot be divided among the vLLM processes."""
    listed, needed = len(backend.devices.split(",")), samplers * backend.tensor_parallel
    if backend.devices and listed != needed:
        raise UserError(
            f"rollout.backend.devices = '{backend.devices}' lists {listed} GPUs, but"
            f" placement.samplers = {samplers} with rollout.backend.tensor_parallel ="
            f" {backend.tensor_parallel} needs {needed}: list as many, or change one of them"
        )


def check_placement(recipe: Recipe, method: Method) -> None:
    """Refuse settings that samplers with weights of their own do not support.

    Raises:
        UserError: names the setting and the remedy.
    """
    _check_replay(recipe.replay, recipe.rollout.prompts_per_step, method)
    rollout, engine = recipe.rollout, recipe.engine
    own = "the samplers have weights of their own, which they get after every step"
    draft, nf4 = engine.speculation.kind == "draft", recipe.model.lora.base == "nf4"
    apart: list[Needed] = [
        ("sync.kind", recipe.sync.kind, "shared", own),
        ("engine.kv_dtype", engine.kv_dtype, "auto", own),
        ("engine.release_kv", engine.release_kv, False, "they keep their memory"),
        *[("rollout.backend.sleep", True, False, "they keep their memory")]
        * (isinstance(rollout.backend, VllmBackend) and rollout.backend.sleep),
        *[("model.lora.base", "nf4", "bfloat16", f"{own}, merged")] * nf4,
    ]
    backend, kind = rollout.backend.kind, recipe.placement.kind
    starts = "they run the embedded engine or vLLM"
    in_processes: list[Needed] = [
        *[("rollout.backend.kind", backend, "engine", starts)] * (backend != "vllm"),
        ("moe.routing", recipe.moe.routing, "free", "they do not record experts"),
        *[("engine.speculation.kind", "draft", "none", "they load one model")] * draft,
    ]
    ahead: list[Needed] = []
    if isinstance(recipe.placement, RayPlacement):
        _check_ray(recipe.placement, rollout.backend)
    if isinstance(recipe.placement, ProcessPlacement):
        _check_sampler_gpus(recipe.placement, backend)
    if not rollout.staleness and rollout.window != RolloutConfig().window:
        raise UserError(
            f"rollout.window = {rollout.window:g} has no effect with rollout.staleness = 0. Remove"
            " it, or set rollout.staleness"
        )
    if engine.update_kv == "recomputed":
        ahead.append(
            ("moe.routing", recipe.moe.routing, "free", "recomputed tokens get other experts")
        )
        if not rollout.staleness:
            raise UserError(
                "engine.update_kv = 'recomputed' has no effect with rollout.staleness = 0: no"
                " sequence runs while weights change. Remove it, or set rollout.staleness"
            )
    for applies, where, needed in (
        (recipe.placement.apart, f"placement.kind = '{kind}'", [*apart, *in_processes]),
        (rollout.staleness > 0, f"rollout.staleness = {rollout.staleness}", [*apart, *ahead]),
    ):
        for key, value, only, why in needed if applies else ():
            if value != only:
                raise UserError(
                    f"{where} does not work with {key} = {toml_literal(value)}: {why}. Set {key} ="
                    f" {toml_literal(only)}, or remove {where.partition(' ')[0]}"
                )


def _check_sampler_gpus(placement: ProcessPlacement, backend: str) -> None:
    """Refuse GPUs for another engine than ours, or that the samplers of a rank do not divide."""
    said, listed = f"placement.devices = '{placement.devices}'", placement.devices.split(",")
    if placement.devices and backend != "engine":
        raise UserError(
            f"{said} is for the embedded engine, and rollout.backend.kind = '{backend}'. Remove it,"
            " or list the GPUs of vLLM in rollout.backend.devices"
        )
    if placement.devices and len(listed) % placement.samplers:
        raise UserError(
            f"{said} lists {len(listed)} GPUs, which is no multiple of placement.samplers ="
            f" {placement.samplers}: list as many for each rank of a machine"
        )


def _check_ray(placement: RayPlacement, backend: Backend) -> None:
    """Refuse Ray where it is not installed or has nothing to do, and GPUs that it decides about."""
    if find_spec("ray") is None:
        raise UserError("placement.kind = 'ray' needs Ray: pip install 'sixfold[ray]'")
    if not placement.samplers and placement.ranks == 1:
        raise UserError(
            "placement.samplers = 0 leaves nothing to Ray with placement.ranks = 1: set one of them"
            " higher, or placement.kind = 'local'"
        )
    if isinstance(backend, VllmBackend) and not placement.samplers:
        raise UserError(
            "placement.samplers = 0 leaves no vLLM process. Set it to at least 1, or"
            " rollout.backend.kind = 'engine'"
        )
    if isinstance(backend, VllmBackend) and backend.devices:
        raise UserError(
            f"rollout.backend.devices = '{backend.devices}' does not work with placement.kind ="
            " 'ray', which gives each vLLM process its GPUs. Remove it"
        )


def _check_prm(training: PrmConfig, scoring: ProcessScoringConfig, labels: str) -> None:
    """Refuse unknown ways to end steps, and the temperature of a minimum that is not taken."""
    named = {"prm.ends": training.ends, "environment.prm.ends": scoring.ends}
    for key, ends in {**named, "sample.label_ends": labels}.items():
        try:
            if ends or key != "environment.prm.ends":
                check_steps(ends)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
    if scoring.credit != "min" and scoring.temperature != ProcessScoringConfig().temperature:
        raise UserError(
            "environment.prm.temperature has no effect with environment.prm.credit ="
            f" '{scoring.credit}'. Set credit = 'min', or remove it"
        )


def _check_prm_rewards(config: EnvironmentConfig, data: DataConfig, scorer: str) -> None:
    """Refuse process reward models where they cannot score, and their settings without one.

    Args:
        scorer: `sample.search.scorer`. A model is read as such a reward, but for its credit.
    """
    own = config.prm
    used = [name for name in config.rewards if name.startswith(PRM)]
    searched = scorer not in ("", VERIFIER)
    implicit = any(map(is_implicit, used)) or len(listed_models(scorer)) == 2
    if not used:
        for key, default in ProcessScoringConfig():
            of_credit = key in ("credit", "temperature")
            if (value := getattr(own, key)) != default and (of_credit or not searched):
                raise UserError(
                    f"environment.prm.{key} = {toml_literal(value)} has no effect without a process"
                    " reward model among environment.rewards. Add prm:PATH, or remove it"
                )
    if own.beta != ProcessScoringConfig().beta and not implicit:
        what, form = used[0] if used else scorer, f"{PRM if used else ''}POLICY,REFERENCE"
        raise UserError(
            f"environment.prm.beta = {own.beta:g} has no effect on '{what}', which is no"
            f" implicit process reward model. Name a policy and its reference, {form}, or remove it"
        )
    if not used:
        return
    if config.several_turns:
        raise UserError(
            f"environment.rewards = ['{used[0]}'] scores the steps of one reply, and"
            " environment.episode or environment.agent plays several. Remove one of them"
        )
    forms = {data.prompt_form, *(entry.prompt_form for entry in data.sources)}
    if "rendered" in forms and own.convention != "sixfold":
        raise UserError(
            f"data.prompt_form = 'rendered' hides the question, which '{used[0]}' may read by"
            f" environment.prm.convention = '{own.convention}'. Set convention = 'sixfold' if a"
            " stage of kind prm has made the model, or use prompts of another form"
        )


def _check_replay(replay: ReplayConfig, prompts: int, method: Method) -> None:
    """Refuse a replay buffer without importance weights, and its settings without the buffer."""
    if not replay.share and replay != ReplayConfig():
        raise UserError(
            "[replay] has no effect with replay.share = 0. Set it, e.g. to 0.25, or remove the"
            " other settings of [replay]"
        )
    if replay.share and not replayed_groups(replay.share, prompts):
        raise UserError(
            f"replay.share = {replay.share:g} of steps of rollout.prompts_per_step = {prompts} is"
            " less than half a group, so nothing would be replayed: raise one of them"
        )
    if replay.share and not method.ratio_from_trainer:
        raise UserError(
            f"replay.share = {replay.share:g} trains older samples again, but '{method.name}' with"
            f" algorithm.correction = '{method.correction}' does not weight them by the ratio of"
            " trainer and sampler. Set algorithm.correction, e.g. 'decoupled', or remove it"
        )


Needed = tuple[str, object, object, str]
"""A setting, its value, the only value that works, and why."""


def _only_embedded(engine: EngineConfig, routing: str) -> list[tuple[str, object, object]]:
    """Settings that only the embedded engine supports, as (key, value, default)."""
    default = EngineConfig()
    return [
        ("moe.routing", routing, "free"),
        ("engine.preemption.kind", engine.preemption.kind, "none"),
        ("engine.speculation.kind", engine.speculation.kind, "none"),
        ("engine.kv_dtype", engine.kv_dtype, "auto"),
        ("engine.chunked_prefill", engine.chunked_prefill, False),
        ("engine.block_size", engine.block_size, default.block_size),
        ("engine.release_kv", engine.release_kv, False),
        ("engine.cuda_graphs", engine.cuda_graphs, "auto"),
    ]


def _options_of_the_server(engine: EngineConfig) -> list[tuple[str, object, object]]:
    """Settings that a server gets when it is started, not from here: (key, value, default)."""
    default = EngineConfig()
    return [
        ("engine.max_running", engine.max_running, default.max_running),
        ("engine.kv_tokens", engine.kv_tokens, default.kv_tokens),
        (
            "engine.prefill_tokens_per_step",
            engine.prefill_tokens_per_step,
            default.prefill_tokens_per_step,
        ),
        ("engine.prefix_cache", engine.prefix_cache, default.prefix_cache),
        ("engine.update_kv", engine.update_kv, default.update_kv),
    ]


def _check_precision(trainer: TrainerConfig, rank: int, precision: str) -> None:
    """Refuse precisions of the trained weights that have no effect or cannot work.

    Args:
        trainer: settings of the weights and of the optimizer.
        rank: rank of a LoRA adapter. 0: there is none.
        precision: dtype of the forward passes.
    """
    if trainer.weights == "bfloat16" and rank:
        raise UserError(
            "trainer.weights = 'bfloat16' has no effect with model.lora.rank ="
            f" {rank}: the trained weights are the adapter's. Set model.lora.base"
            " = 'bfloat16' for the frozen weights, or use trainer.weights = 'float32'"
        )
    if trainer.weights == "bfloat16" and precision != "bfloat16":
        raise UserError(
            "trainer.weights = 'bfloat16' needs run.precision = 'bfloat16': float32 products cannot"
            " read bfloat16 weights. Set run.precision, or use trainer.weights = 'float32'"
        )
    if trainer.rounding == "stochastic" and trainer.weights == "float32":
        raise UserError(
            "trainer.rounding = 'stochastic' has no effect on float32 weights, which are not"
            " rounded. Set trainer.weights = 'bfloat16', or trainer.rounding = 'master'"
        )
    if trainer.optimizer == "adamw8bit" and find_spec("torchao") is None:
        raise UserError(
            "trainer.optimizer = 'adamw8bit' needs torchao, which is not installed. Run"
            " pip install 'sixfold[torchao]', or use trainer.optimizer = 'adamw'"
        )


def _check_reference(reference: ReferenceConfig, rank: int, precision: str) -> None:
    """Refuse settings that save the memory of a reference, where they do not.

    Args:
        rank: rank of a LoRA adapter. 0: there is none.
        precision: dtype of the forward passes.
    """
    for key, value, default in (
        ("precision", reference.precision, "policy"),
        ("offload", reference.offload, False),
    ):
        if value != default and rank and not reference.path:
            raise UserError(
                f"reference.{key} = {toml_literal(value)} has no effect with model.lora.rank ="
                f" {rank}: the reference is the frozen base, which exists once."
                " Remove it"
            )
    if reference.precision == "bfloat16" and precision != "bfloat16":
        raise UserError(
            "reference.precision = 'bfloat16' needs run.precision = 'bfloat16': float32 products"
            " cannot read bfloat16 weights. Set run.precision, or use reference.precision ="
            " 'policy'"
        )
    if reference.offload and reference.placement != "inline":
        why = {
            "fused": "the trainer calls the reference for each micro-batch",
            "worker": "another process holds its weights",
        }[reference.placement]
        raise UserError(
            f"reference.offload = true does not work with reference.placement ="
            f" '{reference.placement}': {why}. Use reference.placement = 'inline', or"
            " reference.offload = false"
        )
