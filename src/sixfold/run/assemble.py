"""Build the six roles from a recipe. Only this module decides which class plays which role."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..data.sources import load_tasks
from ..data.task_set import TaskSet, few_tasks_notes
from ..engine.engine import Engine
from ..engine.routes import RecordedModel
from ..engine.speculative import Speculation
from ..environment.episode import MakeEpisode
from ..environment.episodes import load_episode
from ..environment.scorer import Environment
from ..environment.solved import REWARD
from ..errors import UserError
from ..event_loop import EventLoop
from ..kernels.cpu.engine_kernels import cpu_kernels
from ..model.causal_lm import CausalLM
from ..model.device import prepare_device, resolve_device
from ..model.half_weights import store_in_bfloat16
from ..model.loading import Policy, load_policy, origin_of
from ..model.turn_end import TurnEnd
from ..processes.deadline import Deadline
from ..recipe.adapter_folder import is_adapter
from ..recipe.schema import ModelConfig, Preemption, Recipe
from ..report.numbers import percent
from ..rollout.base import Rollout, groups_in_order
from ..rollout.driver import Driver
from ..rollout.engine_generator import EngineGenerator
from ..rollout.generator import Generator
from ..rollout.player import Limits, OneTurn, Player
from ..rollout.prompt_lengths import fitting_tasks
from ..rollout.renderer.renderer import Renderer
from ..sync.adapter import AdapterSync
from ..sync.quantise import quantised_share
from ..sync.sync import CopySync, SharedSync
from ..sync.versioned import VersionedSync
from ..trainer.logprobs import Scoring
from ..trainer.routing import make_routing
from ..types import Group, SamplingParams, Task
from .draft_model import load_draft
from .kv_size import kv_tokens
from .outside import start_outside
from .rendered_prompt import rendering


@dataclass
class World:
    """Parts that do not change during a run: model, tasks, engine and environment.

    Attributes:
        recipe: the whole run.
        policy: the trained model with its tokenizer.
        tasks: training and held-out tasks.
        renderer: encodes prompts and decodes tokens.
        engine: engine that samples.
        player: plays episodes with the engine.
        environment: scores trajectories.
        loop: event loop of the run.
        scoring: settings for computing log-probs.
        sync: weight sync from trainer to engine.
        device: device of the policy.
        longest: longest sequence, in tokens.
        ending: resources that are closed with the World.
    """

    recipe: Recipe
    policy: Policy
    tasks: TaskSet
    renderer: Renderer
    engine: Engine | Generator
    player: Player
    environment: Environment
    loop: EventLoop
    scoring: Scoring
    sync: SharedSync | AdapterSync | CopySync | VersionedSync
    device: str
    longest: int
    ending: ExitStack = field(default_factory=ExitStack)

    @property
    def sampler(self) -> PreTrainedModel:
        """Weights that the engine should sample from: the policy's, or the quantised copy."""
        if self.recipe.sync.quantised and isinstance(self.engine, Engine):
            return cast(PreTrainedModel, self.engine.runner.model.module)
        return self.policy.model

    @property
    def outside(self) -> bool:
        """True if the engine runs in another process."""
        return not isinstance(self.engine, Engine)

    def train_adapter(self, base: Path) -> None:
        """Freeze the policy's weights, and train a new adapter from now on.

        Args:
            base: folder with the policy's current weights.
        """
        recipe = self.recipe
        self.policy = self.policy.with_lora(recipe.model, origin_of(str(base), ""), recipe.run.seed)
        lora = self.policy.lora
        assert lora is not None
        if isinstance(self.sync, CopySync | VersionedSync):
            self.sync.adapt(lora)
        elif isinstance(self.engine, Engine):
            self.sync = AdapterSync(lora, self.engine)

    def rollout(self, samples: int = 0) -> Driver:
        """Rollout role for training, with the recipe's temperature and truncation.

        Args:
            samples: episodes per task. 0: K.
        """
        r = self.recipe.rollout
        params = replace(self._params(r.temperature), top_p=r.top_p, top_k=r.top_k, min_p=r.min_p)
        return Driver(self.player, params, samples or r.samples_per_prompt)

    def evaluator(self) -> Driver:
        """Rollout role for held-out evaluation."""
        evaluation = self.recipe.eval
        return Driver(self.player, self._params(evaluation.temperature), evaluation.samples)

    def prober(self) -> Driver:
        """Greedy rollout with one sample per task: progress of SFT, or a baseline."""
        return Driver(self.player, self._params(0.0), 1)

    def sample(
        self, rollout: Rollout, tasks: Sequence[Task], seed: int, *, scored: bool = False
    ) -> list[Group]:
        """Groups of a rollout, in the order of the tasks.

        Args:
            rollout: plays the episodes.
            tasks: tasks with distinct ids.
            seed: seed of the sampling noise.
            scored: score them by the environment.
        """
        scorer = self.environment.scorer(len(tasks) * rollout.samples) if scored else None
        return self.loop.run(groups_in_order(rollout.play(tasks, seed, scorer), tasks))

    def _params(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            self.recipe.rollout.max_new_tokens,
            temperature,
            stop_token_ids=self.policy.stop_token_ids,
        )

    def close(self) -> None:
        """End the engine and the worker processes, and close the resources in `ending`."""
        self.player.generator.close()
        self.ending.close()
        self.environment.close()
        self.loop.close()


def build_world(
    recipe: Recipe,
    model_path: str = "",
    *,
    reward: Callable[..., Any] | None = None,
    episode: MakeEpisode | None = None,
    tasks: TaskSet | None = None,
    own_ends: TurnEnd | None = None,
    generator: Generator | None = None,
) -> World:
    """Load the model and the tasks, and create the engine and the environment.

    Args:
        recipe: the whole run.
        model_path: folder of the model. Empty: as the recipe says.
        reward: replaces the recipe's rewards.
        episode: the environment that `environment.episode` names. None: load it.
        tasks: replace the recipe's tasks.
        own_ends: tokens and strings that end a completion by the model's own configuration. Needed
            for a checkpoint, because its model folder also contains those that the recipe added.
        generator: replaces the recipe's engine, and is never synced. None: make the engine.

    Raises:
        UserError: for a missing device, model or dataset, or if prompts do not fit.
    """
    device = resolve_device(recipe.run.device, "run.device")
    prepare_device(device, recipe.run.precision)
    torch.set_num_threads(recipe.run.threads or torch.get_num_threads())
    config = recipe.environment
    if config.episode and episode is None:
        episode = load_episode(config.episode)
    if tasks is None:
        tasks = load_tasks(
            recipe.data,
            seed=recipe.run.seed,
            rewards=() if reward is not None else recipe.environment.rewards,
        )
    source = (
        recipe.model.model_copy(update={"path": model_path, "revision": ""})
        if model_path
        else recipe.model
    )
    environment = _environment(recipe, reward)
    with ExitStack() as on_failure:
        on_failure.callback(environment.close)
        environment.start()  # start early: its workers load while the model loads
        policy = _trained_policy(recipe, source, device)
        policy = policy.stopping_at(recipe.rollout.stop_tokens, recipe.rollout.stop, own_ends)
        # A model from scratch is trained in full by SFT before it gets its adapter.
        if recipe.model.lora.rank and (recipe.model.path or is_adapter(source.path)):
            origin = origin_of(source.path, source.revision)
            policy = policy.with_lora(source, origin, recipe.run.seed)
        renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
        environment.shown = renderer.shown
        longest = min(
            policy.context,
            _fit_prompts(recipe, tasks, renderer, policy.context) + recipe.episode_tokens,
        )
        autocast = torch.bfloat16 if recipe.run.precision == "bfloat16" else None
        scoring = _scoring(recipe, autocast)
        tasks.notes += policy.notes
        tasks.notes += rendering(renderer, tasks.train, policy.stop_token_ids, policy.stop_strings)
        ending = on_failure.enter_context(ExitStack())
        engine, sync = (
            _engine_and_sync(recipe, policy, renderer, longest, autocast, ending, tasks.notes)
            if generator is None
            else (generator, VersionedSync(policy.model, generator, 1, math.inf, longest))
        )
        if (
            isinstance(engine, Engine)
            and device == "cpu"
            and autocast is None
            and cpu_kernels() is None
        ):
            tasks.notes.append(
                "the engine uses PyTorch operations only, which is slower: there is no C compiler,"
                " or SIXFOLD_KERNELS=torch is set"
            )
        player = _player(recipe, policy, renderer, engine, longest, episode)
        on_failure.pop_all()
    return World(
        recipe=recipe,
        policy=policy,
        tasks=tasks,
        renderer=renderer,
        engine=engine,
        player=player,
        environment=environment,
        loop=EventLoop(),
        scoring=scoring,
        sync=sync,
        device=device,
        longest=longest,
        ending=ending,
    )


def _scoring(recipe: Recipe, autocast: torch.dtype | None) -> Scoring:
    """How log-probs are computed. `autocast`: dtype of products, None: that of the weights."""
    return Scoring(
        recipe.rollout.temperature,
        recipe.trainer.logprob_chunk,
        autocast,
        offload=recipe.trainer.activation_offload,
    )


def _trained_policy(recipe: Recipe, source: ModelConfig, device: str) -> Policy:
    """Load the policy with its weights in the dtype that they are trained in.

    For bfloat16 it is loaded on the CPU: its float32 weights may not fit on the GPU.
    """
    if recipe.trainer.weights == "float32":
        return load_policy(source, seed=recipe.run.seed, device=device)
    policy = load_policy(source, seed=recipe.run.seed, device="cpu")
    store_in_bfloat16(policy.model).to(device)  # type: ignore[arg-type]
    return policy


def _environment(recipe: Recipe, reward: Callable[..., Any] | None) -> Environment:
    """The environment with the recipe's rewards, or with one reward that replaces them."""
    config = recipe.environment
    return Environment(
        (reward,) if reward is not None else config.rewards,
        weights=() if reward is not None else config.weights,
        timeout_s=config.timeout_s,
        error_budget=config.error_budget,
        workers=config.workers,
        # An environment's own reward has no name, so the sum decides.
        metric=recipe.eval.metric or (REWARD if config.episode else ""),
        solved_at=recipe.eval.solved_at,
    )


def _player(
    recipe: Recipe,
    policy: Policy,
    renderer: Renderer,
    engine: Engine | Generator,
    longest: int,
    episode: MakeEpisode | None,
) -> Player:
    """The player of the run's episodes.

    Args:
        recipe: the whole run.
        policy: its stop strings end a reply.
        renderer: converts messages to tokens.
        engine: samples the replies.
        longest: longest sequence, in tokens.
        episode: makes the episode of a task. None: a task has one reply.
    """
    config = recipe.environment
    limits = Limits(longest)
    if episode is not None:
        limits = Limits(longest, recipe.rollout.max_turns, config.timeout_s)
    generator: Generator = (
        EngineGenerator(
            engine,
            renderer,
            recipe.engine.release_kv,
            Deadline("the engine", recipe.run.silence_s),
        )
        if isinstance(engine, Engine)
        else engine
    )
    stops = policy.stop_strings
    return Player(generator, renderer, limits, episode or OneTurn, stops, config.episode)


def _engine_and_sync(
    recipe: Recipe,
    policy: Policy,
    renderer: Renderer,
    longest: int,
    autocast: torch.dtype | None,
    ending: ExitStack,
    notes: list[str],
) -> tuple[Engine, SharedSync | AdapterSync | CopySync] | tuple[Generator, VersionedSync]:
    """Create the engine and its weight sync.

    Args:
        recipe: the whole run.
        policy: the trainer's model.
        renderer: decodes completions.
        longest: longest sequence, in tokens.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        ending: receives the callback that ends an engine in another process.
        notes: receives messages for the user.
    """
    if recipe.rollout.backend.kind != "engine":
        return start_outside(recipe, recipe.rollout.backend, policy, renderer, longest, ending)
    engine = make_engine(recipe, policy, longest, autocast, notes)
    if recipe.sync.kind == "shared":
        lora = policy.lora
        return engine, AdapterSync(lora, engine) if lora else SharedSync(policy.model, engine)
    sync = CopySync(policy.model, engine, recipe.sync.every, recipe.sync.kind, policy.lora)
    if policy.lora and not recipe.sync.quantised:  # the engine starts with the base alone
        sync.refresh()
    if recipe.sync.quantised:  # the engine starts with an unquantised copy
        sync.refresh()
        share = quantised_share(policy.plain)
        notes.append(
            f"the engine samples from rounded weights: {percent(share, 0)} of them are rounded to"
            f" {recipe.sync.kind} precision. This saves neither memory nor time."
        )
    return engine, sync


def make_engine(
    recipe: Recipe,
    policy: Policy,
    longest: int,
    autocast: torch.dtype | None,
    notes: list[str] | None = None,
) -> Engine:
    """Create the engine on the policy's own module, or on a copy if the recipe does not share it.

    Args:
        recipe: the whole run.
        policy: the trainer's model.
        longest: longest sequence, in tokens.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        notes: receives messages for the user.

    Raises:
        UserError: for CUDA graphs without a GPU, or if memory does not suffice for one sequence.
    """
    config = recipe.engine
    model = policy.plain
    if config.cuda_graphs == "on" and model.device.type != "cuda":
        raise UserError(
            f"engine.cuda_graphs = 'on' needs a GPU, but the model is on {model.device}: set 'auto'"
        )
    if recipe.sync.kind != "shared":
        model = copy.deepcopy(model).requires_grad_(False)
    speculation, draft = _speculation(recipe, policy, longest)
    routing = make_routing(model, recipe.moe) if recipe.moe.routing != "free" else None
    return Engine(
        CausalLM(model) if routing is None else RecordedModel(CausalLM(model), routing.routers),
        kv_tokens=config.kv_tokens
        or kv_tokens(recipe, policy, longest, notes if notes is not None else [], draft),
        block_size=config.block_size,
        max_running=config.max_running,
        prefill_tokens=config.prefill_tokens_per_step,
        prefix_cache=config.prefix_cache,
        continuous=config.continuous,
        chunked_prefill=config.chunked_prefill,
        preemption=config.preemption.kind,
        host_tokens=_host_tokens(config.preemption),
        kv_dtype=config.kv_dtype,
        autocast=autocast,
        speculation=speculation,
        cuda_graphs={"auto": None, "on": True, "off": False}[config.cuda_graphs],
    )


def _host_tokens(config: Preemption) -> int | None:
    """Tokens in host memory. None: as many as the KV cache."""
    return (config.host_tokens or None) if config.kind == "swap" else None


def _speculation(
    recipe: Recipe, policy: Policy, longest: int
) -> tuple[Speculation | None, PreTrainedModel | None]:
    """Speculation of the recipe, and its draft model if it has one.

    Args:
        recipe: the whole run.
        policy: the trainer's model.
        longest: longest sequence, in tokens.

    Raises:
        UserError: if the draft model does not fit the policy.
    """
    config = recipe.engine.speculation
    if config.kind == "ngram":
        speculation = Speculation(config.tokens, None, config.shortest, config.longest)
        return speculation, None
    if config.kind == "draft":
        draft = load_draft(
            config.path, policy, recipe.run.precision, longest, "engine.speculation.path"
        )
        return Speculation(config.tokens, CausalLM(draft)), draft
    return None, None


def _fit_prompts(recipe: Recipe, tasks: TaskSet, renderer: Renderer, context: int) -> int:
    """Drop or refuse prompts that are too long.

    Returns:
        The longest remaining prompt, in tokens.
    """
    room = context - recipe.rollout.max_new_tokens
    if room < 1:
        raise UserError(
            f"rollout.max_new_tokens = {recipe.rollout.max_new_tokens} leaves no room for a prompt"
            f" in the model's context of {context} tokens: lower it"
        )
    limit = min(room, recipe.data.max_prompt_tokens or room)
    longest = 0
    for name in ("train", "heldout"):
        fitting = fitting_tasks(renderer, getattr(tasks, name), limit, recipe.data.overlong)
        getattr(tasks, name)[:] = fitting.tasks
        longest = max(longest, fitting.longest)
        if fitting.dropped:
            tasks.notes.append(
                f"{name}: {fitting.dropped} tasks dropped because their prompts are longer than"
                f" {limit} tokens"
            )
    tasks.notes += few_tasks_notes(tasks, recipe.rollout.prompts_per_step)
    if renderer.escaped:
        tasks.notes.append(
            f"{renderer.escaped} prompts contain the text of special tokens, which is encoded as"
            " plain text"
        )
    return longest
