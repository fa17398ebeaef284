"""Tools of a run: give its episodes the settings `environment.tools`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from ..environment.episode import MakeEpisode
from ..environment.episodes import library_of, load_episode
from ..environment.sandbox.isolation import detected, required
from ..environment.tools.episode import Equipped, ToolEpisode, own_tools
from ..environment.tools.load import load_tools, mcp_tools
from ..environment.tools.replay import Recorder
from ..environment.tools.running import Slots
from ..environment.tools.setup import ToolSetup
from ..environment.tools.tool import Registry
from ..environment.web.settings import WebSettings
from ..environment.web.user_site import in_browser, with_web
from ..errors import UserError
from ..recipe.schema.environment import EnvironmentConfig
from ..rollout.renderer.renderer import Renderer, RenderError

DEFAULT_SHARE = 0.8
"""Default time limit of a call, as a share of that of a step."""
LONGEST_SHARE = 0.95
"""Longest time limit of a call, as a share of that of a step.

The step must report a call that was too slow before its own limit is over.
"""
TOOLLESS = ("gymnasium", "openenv", "verifiers")
"""Other libraries whose environments take no further tools."""


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
    episode = with_web(episode, WebSettings(**dict(config.web)))
    equipped = Equipped(episode, _setup(config, ending))
    _check(equipped, config)
    return equipped


def _check(equipped: Equipped, config: EnvironmentConfig) -> None:
    """Raise UserError for tools that the episodes cannot use."""
    episode, kind, tools = equipped.make, equipped.tool_class, equipped.setup.tools
    other_class = isinstance(episode, type) and not kind
    if tools and (other_class or library_of(config.episode) in TOOLLESS):
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
        UserError: the episodes use a browser.
    """
    if branches > 1 and episode is not None and (kind := in_browser(episode.make)):
        raise UserError(
            f"rollout.branches = {branches} copies episodes, but those of {kind.__name__!r} use a"
            " browser and cannot be copied. Use rollout.branches = 1"
        )


def tool_tokens(episode: Equipped | None, renderer: Renderer) -> int:
    """Number of tokens that the descriptions of the tools add to a prompt.

    Tools that an episode adds for its task are not counted: they are known only after it starts.
    """
    kind = None if episode is None else episode.tool_class
    if episode is None or kind is None:
        return 0
    tools = Registry([*own_tools(kind), *episode.setup.tools]).descriptions
    question = [{"role": "user", "content": ""}]
    try:
        with_tools = renderer.encode_messages(question, tools)
    except RenderError:
        return 0  # the first episode reports the error
    return len(with_tools) - len(renderer.encode_messages(question))


def _setup(config: EnvironmentConfig, ending: ExitStack) -> ToolSetup:
    settings, recorder = config.tools, None
    if "python" in settings.functions:
        required(config.sandbox.isolation, detected())
    files = {"search": config.search.corpus, "sql": config.sql.database}
    if settings.record and settings.replay:
        raise UserError(
            "environment.tools.record and environment.tools.replay exclude each other. Remove one"
        )
    if settings.record or settings.replay:
        folder = Path(settings.record or settings.replay).expanduser()
        recorder = Recorder(folder, replay=bool(settings.replay))
    functions = load_tools(settings.functions, files)
    return ToolSetup(
        tools=(*functions, *mcp_tools(settings.mcp, recorder, ending)),
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
