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
    """Settings of `environment.web`.

    Attributes:
        page_characters: maximum number of characters of a page that are shown at once.
        answer_s: time limit of a response of the site, in seconds.
        site: the user's own site: `module:object` or `path.py:object` of a WSGI application, or an
            address on this machine.
        goals: goal functions as `path.py:function`. A task names one of them.
    """

    browser: Literal["html", "chromium"] = "html"
    page_characters: int = 4000
    answer_s: float = 3.0
    site: str = ""
    goals: tuple[str, ...] = ()

    @property
    def limits(self) -> Limits:
        return Limits(seconds=self.answer_s)

    def open(self, site: Site) -> Browser:
        backends: dict[str, Callable[[Site], Browser]] = {
            "html": HtmlBrowser,
            "chromium": ChromiumBrowser,
        }
        return backends[self.browser](site)
