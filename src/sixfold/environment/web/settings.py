"""Settings of web environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .browser import Browser
from .chromium import ChromiumBrowser
from .html_browser import HtmlBrowser
from .site import Limits, Site


@dataclass(frozen=True)
class WebSettings:
    """How an episode browses.

    Attributes:
        browser: "html" or "chromium".
        page_characters: longest part of a page that is shown at once.
        answer_s: seconds that a site may take for an answer.
        site: the user's own site: `module:object` or `path.py:object` of a WSGI application, or an
            address on this machine.
        goals: the functions that tasks name as their goal, as `path.py:function`.
    """

    browser: Literal["html", "chromium"] = "html"
    page_characters: int = 4000
    answer_s: float = 3.0
    site: str = ""
    goals: tuple[str, ...] = ()

    @property
    def limits(self) -> Limits:
        """Limits of requests to the site."""
        return Limits(seconds=self.answer_s)

    def open(self, site: Site) -> Browser:
        """A tab of the chosen browser."""
        backends: dict[str, Callable[[Site], Browser]] = {
            "html": HtmlBrowser,
            "chromium": ChromiumBrowser,
        }
        return backends[self.browser](site)
