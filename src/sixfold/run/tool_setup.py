"""Tools of a run: give its episodes the settings `environment.tools`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

from .. import plugins
from ..environment.episode import MakeEpisode
from ..environment.episodes import library_of, load_episode
from ..environment.registry import LIBRARIES, TOOLS
from ..environment.tools.episode import Equipped, ToolEpisode, own_tools
from ..environment.tools.load import load_tools
from ..environment.tools.replay import Recorder
from ..environment.tools.running import Slots
from ..environment.tools.setup import ToolSetup
from ..environment.tools.tool import Registry
from ..errors import UserError
from ..recipe.schema.environment import EnvironmentConfig
from ..renderer.renderer import Renderer
from .recipe_environment import checked_isolation

DEFAULT_SHARE = 0.8
"""Default time limit of a call, as a share of that of a step."""
LONGEST_SHARE = 0.95
"""Longest time limit of a call, as a share of that of a step.

The step must report a call that was too slow before its own limit is over.
"""
SERVERS = "sixfold.tool_servers"
"""Entry points of tools of servers: "mcp" is a function of (command lines and URLs, recorder, stack
that receives the closers) that makes tools.
"""


def recipe_episode(
    config: EnvironmentConfig, episode: MakeEpisode | None, ending: ExitStack
) -> Equipped | None:
    """Maker of the episodes of a recipe, with the recipe's tools and limits.

    Args:
        config: settings of the environment.
        episode: makes the episodes. None: load the environment that `environment.episode` names.
        ending: receives the closers of what the tools start, such as MCP servers.

    Returns:
        None if the recipe has no environment, so that every task has one reply.

    Raises:
        UserError: the environment or a tool cannot be loaded, a tool has no schema, two tools have
            the same name, a tool's time limit is longer than that of a step, or the environment
            does not use the tools.
    """
    if config.episode and episode is None:
        episode = load_episode(config.episode)
    if episode is None:
        return None
    make = episode
    if isinstance(episode, type) and issubclass(episode, ToolEpisode):
        make = episode.configured(config)
    equipped = Equipped(make, _setup(config, ending))
    _check(equipped, config)
    return equipped


def _check(equipped: Equipped, config: EnvironmentConfig) -> None:
    """Raise UserError for tools that the episodes cannot use."""
    episode, kind, tools = equipped.make, equipped.tool_class, equipped.setup.tools
    other_class = isinstance(episode, type) and not kind
    if tools and (other_class or takes_no_tools(config.episode)):
        raise UserError(
            f"environment.tools has no effect with environment.episode = {config.episode!r}. Set"
            " environment.episode = 'tools', or name no tools"
        )
    if kind is ToolEpisode and not tools:
        raise UserError(
            "environment.episode = 'tools' has no tool. Name some in environment.tools.functions"
            " or environment.tools.mcp"
        )
    own = own_tools(kind) if kind else []
    Registry([*own, *tools])
    limits = {repr(one.name): one.timeout_s or 0.0 for one in (*own, *tools)}
    _check_limits({**limits, "environment.tools.timeout_s": config.tools.timeout_s}, config)


def takes_no_tools(episode: str) -> bool:
    """True for an environment of a library whose episodes cannot call tools of a recipe."""
    library = library_of(episode)
    return bool(library) and not LIBRARIES.row(library).takes_tools


def check_template(episode: Equipped | None, renderer: Renderer) -> None:
    """Check that the model can call tools, if the episodes have some.

    Raises:
        UserError: the chat template has no known format of tool calls.
    """
    if episode is not None and episode.tool_class:
        _ = renderer.call_format


def check_branches(episode: Equipped | None, branches: int) -> None:
    """Check that episodes can be copied if samples branch.

    The plan has checked the names of the built-in environments. This checks a user's class.

    Args:
        episode: makes the episodes.
        branches: `rollout.branches`.

    Raises:
        UserError: they cannot be (`ToolEpisode.not_copied`).
    """
    kind = episode.tool_class if episode else None
    if branches > 1 and kind and kind.not_copied:
        raise UserError(
            f"rollout.branches = {branches} copies episodes, but those of {kind.__name__!r}"
            f" {kind.not_copied} and cannot be copied. Use rollout.branches = 1"
        )


def _setup(config: EnvironmentConfig, ending: ExitStack) -> ToolSetup:
    settings, recorder = config.tools, None
    if any(TOOLS.row(name).runs_programs for name in settings.functions if name in TOOLS):
        checked_isolation(config.sandbox.isolation)
    if settings.record and settings.replay:
        raise UserError(
            "environment.tools.record and environment.tools.replay exclude each other. Remove one"
        )
    if settings.record or settings.replay:
        folder = Path(settings.record or settings.replay).expanduser()
        recorder = Recorder(folder, replay=bool(settings.replay))
    files = {name: TOOLS.row(name).file.removeprefix("environment.") for name in TOOLS}
    values = {name: attrgetter(setting)(config) for name, setting in files.items() if setting}
    functions = load_tools(settings.functions, values)
    served = plugins.load(SERVERS, "mcp")(settings.mcp, recorder, ending) if settings.mcp else ()
    return ToolSetup(
        tools=(*functions, *served),
        recorder=recorder,
        timeout_s=settings.timeout_s or DEFAULT_SHARE * config.timeout_s,
        longest_s=LONGEST_SHARE * config.timeout_s,
        max_calls=settings.max_calls,
        max_result=settings.max_result,
        slots=Slots(settings.max_running),
    )


def _check_limits(limits: Mapping[str, float], config: EnvironmentConfig) -> None:
    """Check that every call ends before its step does.

    Args:
        limits: time limits of calls in seconds, by the name of the tool or setting.
        config: has the time limit of a step.

    Raises:
        UserError: a limit is too long.
    """
    for name, limit in limits.items():
        if limit > LONGEST_SHARE * config.timeout_s:
            raise UserError(
                f"environment.timeout_s = {config.timeout_s:g}: the time limit of {name} is"
                f" {limit:g} s, so a step would end before the call does. Set"
                f" environment.timeout_s = {limit / LONGEST_SHARE + 0.5:.0f} or lower the limit"
            )
