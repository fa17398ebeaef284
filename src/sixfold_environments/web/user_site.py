"""Episodes on a user's site: a WSGI application, or a server on this machine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urljoin

from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.grade import Grade, number
from sixfold.environment.named import Named
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.errors import UserError
from sixfold.recipe.schema.environment import EnvironmentConfig
from sixfold.types import Task
from sixfold.user_code import own_copy

from .settings import WebSettings
from .site import Site
from .tools import BrowserTools
from .wsgi import check_loopback, http_answer, wsgi_answer

SITE_ORIGIN = "http://site.test"
"""Origin of a WSGI application. The top-level domain `test` is reserved and never resolves."""

SITES = Named("site", "application", {})
GOALS = Named("goal", "function", {})


@dataclass(frozen=True)
class Visit:
    """Argument of a goal function: the state at the end of an episode.

    Attributes:
        site: the WSGI application, or the address of the site.
        cookies: cookies of the episode's browser, by name.
    """

    task: Task
    site: Any
    cookies: Mapping[str, str]


Goal = Callable[[Visit], "bool | float | Grade"]


class Web(ToolEpisode):
    """An episode on the site that `environment.web.site` names.

    The task's column `start` is the path of the first page (default `/`). The column `goal` names
    one of `environment.web.goals`. It may be missing if there is only one goal. The reward is the
    value of the goal function for the final state.

    Raises:
        ValueError: if the task does not name a goal of the run.
    """

    settings = WebSettings()
    not_copied = "use a browser"

    @classmethod
    def configured(cls, config: EnvironmentConfig) -> type[Web]:
        """The class with the settings of a recipe. See `with_settings`."""
        return cls.with_settings(WebSettings(**dict(config.web)))

    @classmethod
    def with_settings(cls, settings: WebSettings) -> type[Web]:
        """The class with web settings, or itself if it has its own.

        Raises:
            UserError: if the settings name no site or goal, or one that cannot be loaded.
        """
        if cls.settings is not Web.settings:
            return cls
        if not settings.site:
            raise UserError(
                "environment.episode = 'web' needs environment.web.site: module:app of a WSGI"
                " application, or http://127.0.0.1:PORT"
            )
        if _is_address(settings.site):
            check_loopback(settings.site)
        else:
            _loaded_site(settings.site)
        if not settings.goals:
            raise UserError(
                "environment.episode = 'web' needs environment.web.goals: functions as"
                " path.py:function, which tasks name in their column 'goal'"
            )
        for goal in settings.goals:
            _loaded_goal(goal)
        return type(cls.__name__, (cls,), {"settings": settings})

    def __init__(self, task: Task) -> None:
        settings = self.settings
        self._goal = _goal_of(task, settings.goals)
        self._served: Any = settings.site
        if _is_address(settings.site):
            site = Site(settings.site, http_answer(settings.site), settings.limits)
            base = settings.site
        else:
            self._served = _application(settings.site, task)
            site = Site(SITE_ORIGIN, wsgi_answer(self._served), settings.limits)
            base = SITE_ORIGIN
        self._start = urljoin(f"{base.rstrip('/')}/", str(task.columns.get("start", "/")))
        self._browser = BrowserTools(site, settings)
        super().__init__(task, self._browser.tools)

    async def start(self) -> Observation:
        """The task and the first page."""
        return await self._browser.opened(await super().start(), self._start)

    async def final(self, action: Action) -> End:
        """Reward of the goal function for the state of the site."""
        visit = Visit(own_copy(self.task), self._served, await self._browser.cookies())
        value = await asyncio.to_thread(self._goal, visit)
        return End(reward=value if isinstance(value, Grade) else number(value))

    async def close(self) -> None:
        await self._browser.close()


def _is_address(site: str) -> bool:
    return "://" in site


@lru_cache(64)
def _loaded_site(spec: str) -> Callable[..., Any]:
    return SITES.load(spec)


@lru_cache(64)
def _loaded_goal(spec: str) -> Callable[..., Any]:
    return GOALS.load(spec)


def _application(spec: str, task: Task) -> Any:
    """The WSGI application. If the object takes one argument, it makes one for the task."""
    found = _loaded_site(spec)
    try:
        inspect.signature(found).bind(task)
    except (TypeError, ValueError):
        return found
    return found(own_copy(task))


def _goal_of(task: Task, goals: tuple[str, ...]) -> Goal:
    named = {GOALS.name(spec): spec for spec in goals}
    wanted = task.columns.get("goal", next(iter(named)) if len(named) == 1 else None)
    if not isinstance(wanted, str) or wanted not in named:
        raise ValueError(
            f"task {task.id}: its column 'goal' is {wanted!r}, which is not in"
            f" environment.web.goals ({', '.join(named)})"
        )
    return _loaded_goal(named[wanted])
