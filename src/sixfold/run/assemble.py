"""Build the six roles from a recipe. Only this module decides which class plays which role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from .. import plugins
from ..checks.environment import Environment
from ..checks.prints import Prints
from ..data.sources import load_tasks
from ..data.task_set import TaskSet
from ..engine.engine import Engine
from ..environment.episode import MakeEpisode
from ..environment.resource import Resource
from ..environment.tools.episode import Equipped
from ..errors import UserError
from ..event_loop import BackgroundLoop, EventLoop
from ..kernels.cpu.engine_kernels import cpu_kernels
from ..model.device import prepare_device, resolve_device
from ..model.half_weights import store_in_bfloat16
from ..model.loading import Policy, load_policy, origin_of
from ..model.trained_lora import check_adapter
from ..model.turn_end import TurnEnd
from ..model.weights_hash import weights_hash
from ..processes.deadline import Deadline
from ..ranks import ALONE, Ranks
from ..recipe.adapter_folder import is_adapter
from ..recipe.schema import (
    AgentConfig,
    DataConfig,
    ModelConfig,
    MoeConfig,
    Recipe,
    RolloutConfig,
    TrainerConfig,
)
from ..renderer.renderer import Renderer
from ..rollout.base import Rollout, groups_in_order
from ..rollout.branches import Branching
from ..rollout.driver import Driver
from ..rollout.engine_generator import EngineGenerator
from ..rollout.generator import Generator
from ..rollout.player import Limits, OneTurn, Player, Plays
from ..rollout.prompt_lengths import fitting_tasks
from ..sync.adapter import AdapterSync
from ..sync.ranks import RanksSync
from ..sync.sync import CopySync
from ..sync.versioned import VersionedSync
from ..timeline import Timeline
from ..trainer.logprobs import PolicyRoot, Scoring
from ..trainer.routing import make_routing
from ..trainer.sharded import Shards
from ..trainer.whole_weights import whole_model
from ..types import Group, SamplingParams, Task
from .prompt_tools import give_tools
from .recipe_environment import recipe_environment, recipe_judge, strict_environment, task_rewards
from .rendered_prompt import rendering
from .sampler import Sync, engine_and_sync, sharded_policy, token_logp
from .shared_rollout import SharedRollout
from .tool_setup import check_branches, check_template, recipe_episode

AGENTS = "sixfold.agents"
"""Entry points of players that run an agent: "command" is a `MakeAgent`."""


class Agent(Plays, Protocol):
    """Plays episodes by running a program."""

    async def close(self) -> None:
        """End the programs."""


MakeAgent = Callable[[AgentConfig, Player, int], Agent]
"""Makes the player of (settings of the agent, player with the run's generator, vocabulary size)."""


@dataclass
class Assembly:
    """What a recipe is assembled into: model, tasks, engine and environment of a run.

    Attributes:
        recipe: the whole run.
        policy: the trained model with its tokenizer.
        tasks: training and held-out tasks.
        renderer: encodes prompts and decodes tokens.
        engine: engine that samples.
        player: plays episodes with the engine.
        environment: scores trajectories.
        agent: plays episodes by running the recipe's agent. None: the player plays them.
        loop: event loop of the run.
        scoring: settings for computing log-probs.
        sync: weight sync from trainer to engine.
        device: device of the policy.
        longest: longest sequence, in tokens.
        ending: resources that are closed with the Assembly.
        ranks: the ranks of the run.
        shards: the policy, sharded over the ranks. None: there is one rank.
        judge: the model that gives the rewards `judge_*`. None: there are none.
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
    sync: Sync
    device: str
    longest: int
    ending: ExitStack = field(default_factory=ExitStack)
    ranks: Ranks = ALONE
    shards: Shards | None = None
    agent: Agent | None = None
    judge: Resource | None = None
    prints: Prints | None = None
    strict: Environment | None = field(init=False)
    """Scores held-out trajectories once more, by `eval.strict`. None: nothing does."""

    def __post_init__(self) -> None:
        self.strict = strict_environment(
            self.recipe.environment, self.recipe.eval, self.judge, self.prints
        )
        if self.strict:
            self.strict.shown, self.strict.decode = self.renderer.shown, self.renderer.decode

    def root(self) -> PolicyRoot:
        """Body and head of the policy, for training and scoring."""
        if self.shards:
            return self.shards.root
        return PolicyRoot(self.policy.model, make_routing(self.policy.model, self.recipe.moe))

    @property
    def data_ranks(self) -> Ranks:
        """The ranks that share the rows of a batch."""
        return self.shards.ranks if self.shards else self.ranks

    @property
    def sampler(self) -> PreTrainedModel:
        """Weights that the engine should sample from: the policy's, or the quantised copy."""
        if self.recipe.sync.quantised and isinstance(self.engine, Engine):
            return cast(PreTrainedModel, self.engine.runner.model.module)
        return self.policy.model

    @property
    def remote(self) -> bool:
        """True if vLLM or a server samples. Its log-probs may differ more from the trainer's."""
        return not (isinstance(self.engine, Engine) or self.recipe.engines_apart)

    @property
    def whole_policy(self) -> Policy:
        """The policy in one piece. If it is sharded, its model is the engine's, which is equal, or
        a copy.
        """
        if not self.shards or self.policy.lora:
            return self.policy
        if not isinstance(self.engine, Engine):
            return replace(self.policy, model=whole_model(self.policy.model))
        return replace(self.policy, model=cast(PreTrainedModel, self.engine.runner.model.module))

    def policy_hash(self) -> str:
        """Hash of the policy's weights: of the base alone, while an adapter changes no output."""
        lora = self.policy.lora
        if lora and lora.adds_nothing():
            return weights_hash(lora.base.state_dict())
        return weights_hash(self.whole_policy.weights())

    def train_adapter(self, base: Path) -> None:
        """Freeze the policy's weights, and train a new adapter from now on.

        With several ranks, the engine's weights become the base, and the shards are dropped.

        Args:
            base: folder with the policy's current weights.
        """
        recipe, whole = self.recipe, self.whole_policy
        self.policy = whole.with_lora(recipe.model, origin_of(str(base), ""), recipe.run.seed)
        self.shards = sharded_policy(
            recipe.moe, recipe.parallel, self.policy, self.scoring.autocast, self.ranks
        )
        lora = self.policy.lora
        assert lora is not None
        if isinstance(self.sync, RanksSync):
            assert self.shards is not None
            self.sync.adapt(lora, partial(token_logp, self.shards))
        elif isinstance(self.sync, CopySync | VersionedSync):
            self.sync.adapt(lora)
        elif isinstance(self.engine, Engine):
            self.sync = AdapterSync(lora, self.engine)

    @property
    def plays(self) -> Plays:
        """Plays the episodes of training and evaluation."""
        return self.agent or self.player

    def rollout(self, samples: int = 0, overlapping: Plays | None = None) -> Rollout:
        """Rollout role for training, with the recipe's temperature and truncation.

        Args:
            samples: episodes per task. 0: K.
            overlapping: player of calls that overlap. None: there is one call at a time.
        """
        r = self.recipe.rollout
        params = replace(self._params(r.temperature), top_p=r.top_p, top_k=r.top_k, min_p=r.min_p)
        branching = Branching(r.branches, r.branch_turn)
        samples = samples or r.samples_per_prompt
        if overlapping:
            return Driver(overlapping, params, samples, branching, overlapping=True)
        return self._shared(Driver(self.plays, params, samples, branching))

    def evaluator(self) -> Rollout:
        """Rollout role for held-out evaluation."""
        evaluation = self.recipe.eval
        params = self._params(evaluation.temperature)
        return self._shared(Driver(self.plays, params, evaluation.samples, whole=False))

    def prober(self, overlapping: Plays | None = None) -> Rollout:
        """Greedy rollout with one sample per task: progress of SFT, or a baseline.

        Args:
            overlapping: as in `rollout`.
        """
        if overlapping:
            return Driver(overlapping, self._params(0.0), 1, whole=False, overlapping=True)
        return self._shared(Driver(self.plays, self._params(0.0), 1, whole=False))

    def _shared(self, rollout: Rollout) -> Rollout:
        """The rollout, whose tasks are divided among the ranks if there are several."""
        return rollout if self.ranks.size == 1 else SharedRollout(rollout, self.ranks)

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
        self.loop.stop()  # first: episodes in the background would use what is closed
        if self.agent:
            self.loop.run(self.agent.close())
        self.player.generator.close()
        self.ending.close()
        if self.strict:
            self.strict.close()
        _close(self.environment, self.judge, self.loop)


def assemble(
    recipe: Recipe,
    model_path: str = "",
    *,
    reward: Callable[..., Any] | None = None,
    episode: MakeEpisode | None = None,
    tasks: TaskSet | None = None,
    own_ends: TurnEnd | None = None,
    generator: Generator | None = None,
    ranks: Ranks = ALONE,
    prints: Prints | None = None,
    texts: Iterable[str] | None = None,
    before_model: Callable[[], None] | None = None,
    replaying: bool = False,
) -> Assembly:
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
        ranks: the ranks of the run. With several, the policy is sharded.
        prints: gets what rewards print. None: it goes to the terminal. The caller closes it.
        texts: texts of which the tokenizer of a model from scratch is trained.
        before_model: called when tasks, rewards and environment are found to be right.
        replaying: the samplers will follow a recorded schedule.

    Raises:
        UserError: for a missing device, model or dataset, or if prompts do not fit.
    """
    device = resolve_device(recipe.run.device, "run.device")
    prepare_device(device, recipe.run.precision)
    torch.set_num_threads(recipe.run.threads or torch.get_num_threads())
    if tasks is None:
        tasks = load_tasks(
            recipe.data,
            seed=recipe.run.seed,
            rewards=task_rewards(recipe.environment, recipe.eval.strict, reward),
        )
    placed = {"path": model_path, "revision": ""} if model_path else {}
    source = recipe.model.model_copy(update=placed)
    judge = recipe_judge(recipe, reward, ranks.size)
    environment = recipe_environment(recipe.environment, recipe.eval, reward, judge, prints)
    loop = BackgroundLoop() if recipe.rollout.staleness else EventLoop()
    with ExitStack() as on_failure:
        on_failure.callback(_close, environment, judge, loop)
        ending = on_failure.enter_context(ExitStack())
        made = recipe_episode(recipe.environment, episode, ending)
        if made:
            made.check_tasks([*tasks.train, *tasks.heldout])
        check_branches(made, recipe.rollout.branches)
        if before_model is not None:
            before_model()
        environment.start()  # start early: its workers load while the model loads
        policy = _policy(recipe, source, own_ends, device, texts)
        renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
        environment.shown, environment.decode = renderer.shown, renderer.decode
        give_tools(recipe.environment, made, tasks, renderer)
        longest = min(
            policy.context,
            _fit_prompts(recipe.data, recipe.rollout, tasks, renderer, policy.context)
            + recipe.episode_tokens,
        )
        autocast = torch.bfloat16 if recipe.run.precision == "bfloat16" else None
        scoring = _scoring(recipe.rollout.temperature, recipe.trainer, autocast)
        tasks.notes += [*policy.notes, *(judge.notes(recipe.model.path) if judge else ())]
        tasks.notes += rendering(renderer, tasks.train, policy.stop_token_ids, policy.stop_strings)
        given = recipe, policy, renderer, longest, autocast, ending, tasks.notes, loop, generator
        engine, sync, shards = engine_and_sync(*given, ranks, replaying)
        tasks.notes += _kernel_notes(engine, device, autocast)
        player = _player(recipe, policy, renderer, engine, longest, made)
        agent = agent_player(recipe.environment.agent, policy, player)
        on_failure.pop_all()
    return Assembly(
        recipe=recipe,
        policy=policy,
        tasks=tasks,
        renderer=renderer,
        engine=engine,
        player=player,
        environment=environment,
        loop=loop,
        scoring=scoring,
        sync=sync,
        device=device,
        longest=longest,
        ending=ending,
        ranks=ranks,
        shards=shards,
        agent=agent,
        judge=judge,
        prints=prints,
    )


def _close(environment: Environment, judge: Resource | None, loop: EventLoop) -> None:
    """End the reward processes, the judge after all who ask it, and then the event loop."""
    environment.close()
    if judge:
        judge.close()
    loop.close()


def _kernel_notes(
    engine: Engine | Generator, device: str, autocast: torch.dtype | None
) -> list[str]:
    """A note if the engine lacks its compiled kernels."""
    exact = isinstance(engine, Engine) and device == "cpu" and autocast is None
    if not exact or cpu_kernels() is not None:
        return []
    return [
        "the engine uses PyTorch operations only, which is slower: there is no C compiler,"
        " or SIXFOLD_KERNELS=torch is set"
    ]


def _scoring(temperature: float, trainer: TrainerConfig, autocast: torch.dtype | None) -> Scoring:
    """Settings for computing log-probs. autocast: dtype of matrix products, or the weights'."""
    return Scoring(temperature, trainer.logprob_chunk, autocast, offload=trainer.activation_offload)


def _policy(
    recipe: Recipe,
    source: ModelConfig,
    own_ends: TurnEnd | None,
    device: str,
    texts: Iterable[str] | None,
) -> Policy:
    """Load the policy, with its ends and its adapter. Refuse settings that do not fit the model.

    A model from scratch gets its adapter later: SFT first trains all its weights.
    """
    seed, lora = recipe.run.seed, recipe.model.lora
    policy = _loaded(source, seed, recipe.trainer.weights, device, texts)
    policy = policy.stopping_at(recipe.rollout.stop_tokens, recipe.rollout.stop, own_ends)
    if recipe.moe != MoeConfig():
        make_routing(policy.model, recipe.moe)
    if not lora.rank:
        return policy
    if not recipe.model.path and not is_adapter(source.path):
        check_adapter(policy.model, lora)
        return policy
    return policy.with_lora(source, origin_of(source.path, source.revision), seed)


def _loaded(
    source: ModelConfig, seed: int, weights: str, device: str, texts: Iterable[str] | None
) -> Policy:
    """Load the policy with its weights in the dtype of `trainer.weights`.

    For bfloat16 the policy is loaded on the CPU, because its float32 weights may not fit on the
    GPU.
    """
    if weights == "float32":
        return load_policy(source, seed=seed, device=device, texts=texts)
    policy = load_policy(source, seed=seed, device="cpu", texts=texts)
    store_in_bfloat16(policy.model).to(device)  # type: ignore[arg-type]
    return policy


def _player(
    recipe: Recipe,
    policy: Policy,
    renderer: Renderer,
    engine: Engine | Generator,
    longest: int,
    episode: Equipped | None,
) -> Player:
    """The player of the run's episodes."""
    config = recipe.environment
    check_template(episode, renderer)
    limits = Limits(longest)
    if config.several_turns:
        limits = Limits(longest, recipe.rollout.max_turns, config.timeout_s, recipe.episode_tokens)
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
    timeline = Timeline(recipe.log.trace_steps)
    return Player(generator, renderer, limits, episode or OneTurn, stops, config.episode, timeline)


def agent_player(config: AgentConfig, policy: Policy, player: Player) -> Agent | None:
    """The player of the recipe's agent, if it has one.

    Raises:
        UserError: if the agent cannot be used, or the server's packages are missing.
    """
    if not config.command:
        return None
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"environment.agent.command needs {' and '.join(missing)}. Run pip install"
            " 'sixfold[serve]'"
        )
    make: MakeAgent = plugins.load(AGENTS, "command")
    return make(config, player, int(policy.model.config.get_text_config().vocab_size))


def _fit_prompts(
    data: DataConfig, rollout: RolloutConfig, tasks: TaskSet, renderer: Renderer, context: int
) -> int:
    """Drop or refuse prompts that are too long.

    Returns:
        The longest remaining prompt, in tokens.
    """
    room = context - rollout.max_new_tokens
    if room < 1:
        raise UserError(
            f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt"
            f" in the model's context of {context} tokens: lower it"
        )
    limit = min(room, data.max_prompt_tokens or room)
    longest = 0
    for name in ("train", "heldout"):
        fitting = fitting_tasks(renderer, getattr(tasks, name), limit, data.overlong)
        getattr(tasks, name)[:] = fitting.tasks
        longest = max(longest, fitting.longest)
        if fitting.dropped:
            tasks.notes.append(
                f"{name}: {fitting.dropped} tasks dropped because their prompts are longer than"
                f" {limit} tokens"
            )
    if renderer.escaped:
        tasks.notes.append(
            f"{renderer.escaped} prompts contain the text of special tokens, which is encoded as"
            " plain text"
        )
    return longest
