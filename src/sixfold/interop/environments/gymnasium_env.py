"""Gymnasium environments as episodes: `environment.episode = "gymnasium:ID"`.

A task is a seed, and its prompt the first observation. Needs the extra `envs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from ...environment.episode import Action, End, MakeEpisode, Observation
from ...environment.rewards import checked_value
from ...errors import UserError, nearest, one_line
from ...types import Message, Outcome, Task
from .actions import Actions, MalformedAction, actions_of
from .observations import observation_text, with_observation
from .own_thread import OwnThread
from .spec import Spec, import_module, parsed

KIND = "gymnasium"
DEFAULT_TASKS = 2000
"""Seeds if data.limit is not set."""

SEEDS_PER_RUN = 1_000_000
"""Distance between the first seeds of two values of run.seed."""


@dataclass(frozen=True)
class Game:
    """An environment that `gymnasium.make` can make.

    Attributes:
        text: its name, as the user wrote it after `gymnasium:`.
        spec: the same, parsed.
        maker: class or function that makes it, if it is not registered under an id.
    """

    text: str
    spec: Spec
    maker: Callable[..., Any] | None = None

    @property
    def where(self) -> str:
        """Its name in messages."""
        return f"{KIND}:{self.text}"

    def make(self) -> Any:
        """A new environment.

        Raises:
            UserError: if the id is unknown, or the environment refuses its arguments.
        """
        gymnasium = _library()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as: there is a newer version
            try:
                if self.maker is not None:
                    return self.maker(**self.spec.arguments)
                # The checks of this module replace Gymnasium's checker, which warns at every step.
                return gymnasium.make(
                    self.spec.name, disable_env_checker=True, **self.spec.arguments
                )
            except gymnasium.error.UnregisteredEnv as error:
                hint = nearest(self.spec.name, list(gymnasium.registry))
                said = str(error).partition(" Did you mean")[0]
                raise UserError(f"{self.where}: {said}{hint}") from error
            except Exception as error:
                raise UserError(f"{self.where} cannot be made: {one_line(error)}") from error


def gymnasium_episode(text: str) -> MakeEpisode:
    """Episodes of the environment that `text` names: `ID`, `module:ID` or `path/to/file.py:ID`.

    Instead of an id, the name of a class in the module will do.

    Arguments of its constructor may follow: `ID?map_name="8x8"&is_slippery=false`.

    Raises:
        UserError: if there is no such environment, or its actions have no text form.
    """
    game = _game(text)
    env = game.make()
    try:
        actions_of(env, game.where)
    finally:
        env.close()
    return lambda task: GymnasiumEpisode(game, task)


def gymnasium_tasks(text: str, limit: int, seed: int) -> list[Task]:
    """One task per seed.

    Args:
        text: the environment, as for `gymnasium_episode`.
        limit: number of tasks. 0: `DEFAULT_TASKS`.
        seed: the run's seed. It chooses the seeds of the tasks.

    Raises:
        UserError: if there is no such environment, or it cannot be reset.
    """
    game = _game(text)
    env = game.make()
    first = seed * SEEDS_PER_RUN
    try:
        return [_task(game, env, first + n) for n in range(limit or DEFAULT_TASKS)]
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{game.where} failed in reset: {one_line(error)}") from error
    finally:
        env.close()


def _task(game: Game, env: Any, seed: int) -> Task:
    observation = observation_text(_reset(env, seed)[0])
    if not observation.strip():
        raise UserError(f"{game.where}: its first observation for seed {seed} is empty")
    return Task(
        id=f"{game.where}-{seed}",
        prompt=observation,
        columns={"seed": seed, "observation": observation},
        source=game.where,
        world=str(seed),
    )


class GymnasiumEpisode:
    """One episode of a Gymnasium environment.

    The reward of a step is the turn's reward. `terminated` ends the episode with the outcome
    "ended", `truncated` with "turns". A reply without a legal action is answered by a hint, and the
    environment does not see it.

    Args:
        game: the environment.
        task: its column `seed` seeds the environment.
    """

    def __init__(self, game: Game, task: Task) -> None:
        self._game = game
        self._task = task
        self._thread = OwnThread()
        self._env: Any = None
        self._actions: Actions | None = None

    async def start(self) -> Observation:
        """Make and reset the environment."""
        seen = await self._thread.call(self._begin)
        recorded = str(self._task.columns.get("observation", self._task.prompt_text))
        prompt = with_observation(self._task, recorded, seen).prompt
        return Observation(text=prompt) if isinstance(prompt, str) else Observation(prompt)

    async def step(self, action: Action) -> Observation | End:
        """Act, and observe."""
        assert self._actions is not None
        try:
            chosen = self._actions.read(action.text)
        except MalformedAction as error:
            hint = (_user(self._actions.hint(error)),)
            refused = {"kind": "malformed_action", "message": str(error)}
            return Observation(hint, events=(refused,), tool_errors=1)
        seen, reward, terminated, truncated = await self._thread.call(self._act, chosen)
        event: dict[str, Any] = {
            "kind": "environment_step",
            "action": _shown(chosen),
            "reward": reward,
        }
        if terminated or truncated:
            outcome: Outcome = "ended" if terminated else "turns"
            return End(reward, outcome, events=({**event, "observation": seen},))
        return Observation((_user(seen),), reward=reward, events=(event,))

    async def close(self) -> None:
        """Close the environment."""
        try:
            if self._env is not None:
                await self._thread.call(self._env.close)
        finally:
            self._thread.end()

    def _begin(self) -> str:
        self._env = self._game.make()
        self._actions = actions_of(self._env, self._game.where)
        return observation_text(_reset(self._env, self._task.columns.get("seed"))[0])

    def _act(self, action: Any) -> tuple[str, float, bool, bool]:
        answer = self._env.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            found = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
            raise TypeError(
                f"step returned {found}, not the five of Gymnasium: observation, reward,"
                " terminated, truncated, info"
            )
        seen, reward, terminated, truncated, _ = answer
        return observation_text(seen), checked_value(reward), bool(terminated), bool(truncated)


def _reset(env: Any, seed: Any) -> tuple[Any, Any]:
    answer = env.reset(seed=None if seed is None else int(seed))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(
            f"reset returned {type(answer).__name__}, not a tuple of an observation and an info"
        )
    return answer


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _shown(action: Any) -> Any:
    return action if isinstance(action, str) else action.tolist()


@lru_cache(maxsize=8)
def _game(text: str) -> Game:
    """The environment that the text names. Imports the module that registers it."""
    spec = parsed(KIND, text)
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
