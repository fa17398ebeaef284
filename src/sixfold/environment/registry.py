"""Rewards, environments and tools that packages register by name (`plugins`).

An entry point names a row of this module, or the object itself: a reward function, a class of
episodes, a function for a tool. A row says what the core must know before it loads the object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..plugins import Registered


@dataclass(frozen=True)
class RewardRow:
    """A reward.

    Attributes:
        spec: the function as `module:function`.
        verifier: whether it tells if a completion is right. A reward for the format does not. None:
            not known.
        bounded: it needs little memory: a process that runs only such rewards is limited.
        times_itself: it keeps its time limit itself: waiting for a sandbox, or for a free
            connection to a judge, does not count.
        runs_programs: it runs programs of the model in a sandbox.
        needs: name of a resource of the run ("sixfold.resources") from which the function makes the
            reward, which then runs in the process of the run. "": none.
        prepare: function as `module:function` that loads what its checks need, before the first.
        source: name of the only data source whose tasks it scores. "": any.
        answer: the reference answer of its tasks: "" (none is needed), "value", or "list" (a list
            will do as well).
        version: raised whenever its values change. A resumed run compares it. 0: the file of the
            function is compared instead.
        step_rewards: whether its grades have steps. None: not known.
    """

    spec: str
    verifier: bool | None = True
    bounded: bool = False
    times_itself: bool = False
    runs_programs: bool = False
    needs: str = ""
    prepare: str = ""
    source: str = ""
    answer: Literal["", "value", "list"] = ""
    version: int = 1
    step_rewards: bool | None = False


@dataclass(frozen=True)
class EpisodeRow:
    """An environment of several turns.

    Attributes:
        spec: the class as `module:class`.
        copyable: False if two copies of an episode would act on the same thing.
        step_rewards: whether it rewards replies or steps before the end. None: not known.
    """

    spec: str
    copyable: bool = True
    version: int = 1
    step_rewards: bool | None = False


@dataclass(frozen=True)
class LibraryRow:
    """A library whose environments are named `LIBRARY:NAME`.

    Attributes:
        spec: function as `module:function` that makes the class of episodes of a NAME.
        tasks: function as `module:function` of (NAME, data settings, seed) that makes training
            tasks, held-out tasks and notes. "": the library has no tasks.
        takes_tools: whether its episodes may call the tools of a recipe.
    """

    spec: str
    tasks: str = ""
    takes_tools: bool = False
    step_rewards: bool | None = False


@dataclass(frozen=True)
class ToolRow:
    """A tool.

    Attributes:
        spec: the function as `module:function`.
        file: setting of the file from which the function makes tools. "": it is the tool.
        runs_programs: it runs programs of the model in a sandbox.
    """

    spec: str
    file: str = ""
    runs_programs: bool = False


@dataclass(frozen=True)
class SourceRow:
    """A source of tasks.

    Attributes:
        spec: function as `module:function` of (data settings, seed) that makes tasks.
    """

    spec: str


def _unknown_reward(spec: str) -> RewardRow:
    return RewardRow(spec, verifier=None, version=0, step_rewards=None)


NO_ROW = _unknown_reward("")
"""Row of a reward that was given as a function."""


REWARDS = Registered("sixfold.rewards", RewardRow, _unknown_reward)
EPISODES = Registered(
    "sixfold.environments",
    EpisodeRow,
    lambda spec: EpisodeRow(spec, version=0, step_rewards=None),
)
LIBRARIES = Registered("sixfold.libraries", LibraryRow, LibraryRow)
TOOLS = Registered("sixfold.tools", ToolRow, ToolRow)
SOURCES = Registered("sixfold.sources", SourceRow, SourceRow)


def reward_row(spec: str) -> RewardRow:
    """The row of a reward as a recipe names it: by name, or by file or module."""
    return REWARDS.row(spec) if spec in REWARDS else _unknown_reward(spec)


def any_needs(resource: str, specs: Iterable[str]) -> bool:
    """True if one of the rewards is made from a resource of the run."""
    return any(reward_row(spec).needs == resource for spec in specs if spec)


def any_runs_programs(specs: Iterable[str]) -> bool:
    """True if one of the rewards runs programs of the model."""
    return any(reward_row(spec).runs_programs for spec in specs)
