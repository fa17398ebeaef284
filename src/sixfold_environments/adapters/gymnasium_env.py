"""Gymnasium environments as episodes: `environment.episode = "gymnasium:ID"`.

A task is a seed. Its prompt is the first observation. Needs the extra `envs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from sixfold.environment.episode import Action, End, MakeEpisode, Observation
from sixfold.environment.grade import checked_value
from sixfold.environment.named import loading
from sixfold.environment.own_thread import OwnThread
from sixfold.errors import UserError, nearest
from sixfold.types import Outcome, Task

from .actions import Actions, Adapted, MalformedAction, actions_of, hints, malformed_answer
from .observations import observation_text, step_answer
from .seeds import SEEDS_PER_RUN, first_observation, seed_task, task_seed
from .spec import Spec, import_module, parse_spec

KIND = "gymnasium"
DEFAULT_TASKS = 2000
"""Number of tasks if data.limit is not set."""


@dataclass(frozen=True)
class Game:
    """An environment of Gymnasium.

    Attributes:
        text: its name, as the user wrote it after `gymnasium:`.
        maker: class or function that makes it. None: `gymnasium.make` makes it by its id.
    """

    text: str
    spec: Spec
    maker: Callable[..., Any] | None = None

    @property
    def where(self) -> str:
        return f"{KIND}:{self.text}"

    def make(self) -> Any:
        """A new environment.

        Raises:
            UserError: if the id is unknown, or the environment refuses its arguments.
        """
        gymnasium = _library()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example that a newer version exists
            with loading(f"{self.where} cannot be made"):
                if self.maker is not None:
                    return self.maker(**self.spec.arguments)
                try:
                    # The checks of this module replace Gymnasium's checker, which warns at every
                    # step.
                    return gymnasium.make(
                        self.spec.name, disable_env_checker=True, **self.spec.arguments
                    )
                except gymnasium.error.UnregisteredEnv as error:
                    hint = nearest(self.spec.name, list(gymnasium.registry))
                    said = str(error).partition(" Did you mean")[0]
                    raise UserError(f"{self.where}: {said}{hint}") from error


def gymnasium_episode(text: str) -> MakeEpisode:
    """Make a function that makes the episodes of an environment.

    Args:
        text: `ID`, `module:ID` or `path/to/file.py:ID`. With a module or file, the name of a class
            in it may take the place of the id. Arguments of the environment may follow:
            `ID?map_name="8x8"&is_slippery=false`.

    Raises:
        UserError: the environment does not exist, or its actions have no text form.
    """
    game = _game(text)
    env = game.make()
    try:
        actions = actions_of(env, game.where)
    finally:
        env.close()
    own = hints(actions.read, actions.expected)
    return Adapted(lambda task: GymnasiumEpisode(game, task), own)


def gymnasium_tasks(text: str, limit: int, seed: int) -> list[Task]:
    """One task per seed.

    Args:
        text: the environment, as for `gymnasium_episode`.
        limit: number of tasks. 0: `DEFAULT_TASKS`.
        seed: the run's seed. It chooses the seeds of the tasks.

    Raises:
        UserError: the environment does not exist or cannot be reset, or an observation is empty.
    """
    game = _game(text)
    env = game.make()
    first = seed * SEEDS_PER_RUN
    with closing(env), loading(f"{game.where} failed in reset"):
        return [
            seed_task(game.where, seed, observation_text(_reset(env, seed)[0]))
            for seed in range(first, first + (limit or DEFAULT_TASKS))
        ]


class GymnasiumEpisode:
    """One episode of a Gymnasium environment.

    The reward of a step is the reward of the turn. `terminated` ends the episode with the outcome
    "ended", `truncated` with "turns". A reply without a legal action gets a hint and no step.

    Args:
        task: its column `seed` seeds the environment.
    """

    def __init__(self, game: Game, task: Task) -> None:
        self._game = game
        self._task = task
        self._thread = OwnThread()
        self._env: Any = None
        self._actions: Actions | None = None

    async def start(self) -> Observation:
        return first_observation(self._task, await self._thread.call(self._begin))

    async def step(self, action: Action) -> Observation | End:
        assert self._actions is not None
        try:
            chosen = self._actions.read(action.text)
        except MalformedAction as error:
            return malformed_answer(error, self._actions.expected)
        seen, reward, terminated, truncated = await self._thread.call(self._act, chosen)
        outcome: Outcome | None = "ended" if terminated else "turns" if truncated else None
        return step_answer(_as_json(chosen), seen, reward, outcome)

    async def close(self) -> None:
        """Close the environment, after a call that still runs."""
        try:
            await self._thread.call(self._close)
        finally:
            self._thread.end()

    def _begin(self) -> str:
        self._env = self._game.make()
        self._actions = actions_of(self._env, self._game.where)
        return observation_text(_reset(self._env, task_seed(self._task))[0])

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _act(self, action: Any) -> tuple[str, float, bool, bool]:
        answer = self._env.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            found = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
            raise TypeError(
                f"step returned {found}. Return the five values of Gymnasium: observation, reward,"
                " terminated, truncated, info"
            )
        seen, reward, terminated, truncated, _ = answer
        return observation_text(seen), checked_value(reward), bool(terminated), bool(truncated)


def _reset(env: Any, seed: int | None) -> tuple[Any, Any]:
    answer = env.reset(seed=seed)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(
            f"reset returned {type(answer).__name__}. Return a tuple of an observation and an info"
        )
    return answer


def _as_json(action: Any) -> Any:
    return action if isinstance(action, str) else action.tolist()


@lru_cache(maxsize=8)
def _game(text: str) -> Game:
    """The environment with this name. Imports the module that registers it."""
    spec = parse_spec(KIND, text)
    gymnasium = _library()
    members = vars(import_module(KIND, spec.module)) if spec.module else {}
    maker = members.get(spec.name)
    registered = spec.name in gymnasium.registry
    return Game(text, spec, maker if callable(maker) and not registered else None)


def _library() -> ModuleType:
    try:
        import gymnasium
    except ImportError as error:
        raise UserError("gymnasium is not installed. Run pip install 'sixfold[envs]'") from error
    return gymnasium
