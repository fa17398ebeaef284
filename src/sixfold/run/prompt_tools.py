"""Tools that prompts show: those of a task's environment, or those of a dataset's column.

They are known before the first step, so a prompt is counted as the model reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..data.prompts import ARGUMENTS, TOOLS
from ..data.task_set import TaskSet, drawn_tasks
from ..environment.episode import Closing, Episode, WritesErrors
from ..environment.tools.episode import Equipped, ToolEpisode, own_tools
from ..environment.tools.tool import Registry
from ..errors import UserError
from ..recipe.schema.environment import EnvironmentConfig
from ..renderer.renderer import Renderer
from ..rollout.generator import wait_for
from ..types import Task
from .tool_setup import takes_no_tools

PROBED = 64
"""Maximum number of episodes that are made to read their tools, if each may have its own."""

_KIND = "environment"
"""Column that chooses one of several environments of TRL."""

Tools = tuple[Mapping[str, Any], ...]


def give_tools(
    config: EnvironmentConfig, episode: Equipped | None, tasks: TaskSet, renderer: Renderer
) -> None:
    """Give tasks the tools that their prompts show, and note what a dataset has and they do not.

    Args:
        config: settings of the environment.
        episode: makes the episodes. None: a task has one reply, or an agent plays.
        tasks: changed in place.
        renderer: renders the prompts.

    Raises:
        UserError: the model cannot read errors of the environment: characters have no token.
    """
    both = [*tasks.train, *tasks.heldout]
    with_column = [task for task in both if task.tools]
    if config.several_turns:
        if episode and isinstance(episode.make, WritesErrors):
            _check_errors(episode.make.own_errors, renderer)
        known = _of_episodes(config, episode, both, renderer)
        for some in (tasks.train, tasks.heldout):
            some[:] = [replace(task, tools=known.get(task.id, ())) for task in some]
        reason = "the environment has tools of its own"
    elif with_column and renderer.has_template and renderer.shows_tools(with_column[0]):
        tasks.notes.append(f"{len(with_column)} prompts show the functions of the column {TOOLS!r}")
        reason = ""
    else:
        for some in (tasks.train, tasks.heldout):
            some[:] = [replace(task, tools=()) if task.tools else task for task in some]
        reason = "the chat template shows none" if renderer.has_template else "no chat template"
    if with_column and reason:
        tasks.notes.append(
            f"{len(with_column)} prompts do not show the functions of the column {TOOLS!r}:"
            f" {reason}"
        )
    if not renderer.has_template and any(task.template_args for task in both):
        tasks.notes.append(f"the column {ARGUMENTS!r} has no effect: there is no chat template")


def _of_episodes(
    config: EnvironmentConfig, episode: Equipped | None, tasks: Sequence[Task], renderer: Renderer
) -> dict[str, Tools]:
    """Descriptions of the tools of each task's episode, by the task's id.

    Tools that an episode learns only in `start` are not known.

    Raises:
        UserError: the tokenizer does not know characters of errors about wrong calls.
    """
    if episode is None or takes_no_tools(config.episode):
        return {}
    kind, make = episode.tool_class, episode.make
    if isinstance(make, type) and kind is None:
        return {}
    if kind is not None and kind.__init__ is ToolEpisode.__init__:
        every = _shown(Registry([*own_tools(kind), *episode.setup.tools]), renderer)
        return {task.id: every for task in tasks}
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(str(task.columns.get(_KIND, "")), []).append(task)
    if len(groups) > PROBED:
        groups = {"": list(tasks)}
    found: dict[str, Tools] = {}
    for some in groups.values():
        probed = {
            task.id: _described(episode, task, renderer)
            for task in drawn_tasks(some, PROBED // len(groups), 0)
        }
        longest = max(probed.values(), key=lambda tools: len(json.dumps(tools, default=str)))
        found |= {task.id: probed.get(task.id, longest) for task in some}
    return found


def _described(episode: Equipped, task: Task, renderer: Renderer) -> Tools:
    """Descriptions of the tools of one episode, which is made and closed."""
    made: Episode | None = None
    registry = None
    try:
        made = episode(task)
        registry = made.registry if isinstance(made, ToolEpisode) else None
    # Boundary: the first episode that is played reports the error.
    except (Exception, SystemExit):  # noqa: BLE001
        pass
    finally:
        if isinstance(made, Closing):
            with suppress(Exception):
                wait_for(made.close())
    return _shown(registry, renderer) if registry else ()


def _shown(registry: Registry, renderer: Renderer) -> Tools:
    """Descriptions of the tools, whose errors the model can read."""
    _check_errors(registry.errors, renderer)
    return registry.descriptions


def _check_errors(texts: Iterable[str], renderer: Renderer) -> None:
    """Check that errors of the environment can be tokenized.

    Args:
        texts: what the environment answers to replies that it cannot use.
        renderer: has the tokenizer.

    Raises:
        UserError: the tokenizer does not know some of their characters.
    """
    texts = [text for text in texts if renderer.unknown(text)]
    if texts:
        unknown = "".join(dict.fromkeys("".join(map(renderer.unknown, texts))))
        raise UserError(
            f"environment.episode: its errors have characters that the model's tokenizer does not"
            f" know: {unknown!r}, for example in {texts[0][:80]!r}. Add them to"
            " model.scratch.alphabet, or use a model with another tokenizer"
        )
