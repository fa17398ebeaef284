"""Episodes in the shop: browser tools, and a reward from the state of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.grade import right_or_wrong
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.recipe.schema.environment import EnvironmentConfig
from sixfold.types import Task

from .settings import WebSettings
from .shop import Shop
from .site import Site
from .tasks import goal_met, shop_of
from .tools import BrowserTools
from .wsgi import wsgi_answer

SHOP_ORIGIN = "http://shop.test"


class WebShop(ToolEpisode):
    """Episode in the built-in shop. The reward is 1 if its orders and carts match the task.

    The first message is the task's prompt and the first page.

    Args:
        task: a task of `data.source = "web_shop"`.
    """

    settings = WebSettings()
    not_copied = "use a browser"

    @classmethod
    def configured(cls, config: EnvironmentConfig) -> type[WebShop]:
        """The class with the settings of a recipe. See `with_settings`."""
        return cls.with_settings(WebSettings(**dict(config.web)))

    @classmethod
    def with_settings(cls, settings: WebSettings) -> type[WebShop]:
        """The class with web settings, or itself if it has its own."""
        if cls.settings is not WebShop.settings:
            return cls
        return type(cls.__name__, (cls,), {"settings": settings})

    def __init__(self, task: Task) -> None:
        self._shop: Shop = shop_of(task)
        self._wanted: Mapping[str, Any] = task.columns["shop"]["wanted"]
        # The html backend calls the shop in this process. It answers at once and needs no thread.
        quick = self.settings.browser == "html"
        site = Site(SHOP_ORIGIN, wsgi_answer(self._shop), self.settings.limits, quick=quick)
        self._browser = BrowserTools(site, self.settings)
        super().__init__(task, self._browser.tools)

    async def start(self) -> Observation:
        """The task and the first page."""
        return await self._browser.opened(await super().start(), f"{SHOP_ORIGIN}/")

    async def final(self, action: Action) -> End:
        """Reward 1 if the state of the shop is the goal of the task, else 0."""
        return End(reward=right_or_wrong(goal_met(self._shop, self._wanted)))

    async def close(self) -> None:
        await self._browser.close()
