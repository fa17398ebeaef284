"""Browser tools: the policy sees the accessibility tree and names elements by their number."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, Never

from sixfold.environment.episode import Observation
from sixfold.environment.tools.observation import ToolError, ToolsFailed
from sixfold.environment.tools.tool import Tool, tool
from sixfold.errors import one_line
from sixfold.types import Message

from .browser import ActionError, BrowserFault
from .session import Session
from .settings import WebSettings
from .site import Site, SiteFault


class BrowserTools:
    """Tools of a browser on one site.

    Args:
        site: the site.
        settings: web settings of the run.
    """

    def __init__(self, site: Site, settings: WebSettings) -> None:
        self._browser = settings.open(site)
        self._session = Session(self._browser, settings.page_characters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Never:
        """Refuse a branch: both episodes would act on the same site."""
        raise TypeError("a browser and its site cannot be copied")

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in the order in which the policy sees them."""
        return (self.click, self.type, self.select, self.back, self.more)

    async def opened(self, first: Observation, url: str) -> Observation:
        """Open the first page and append it to the last message of the first observation.

        Args:
            first: observation with the task's prompt and the tools.
            url: address of the page.
        """
        page = await self._session.open(url)
        *before, last = first.messages
        asked = Message(role=last["role"], content=f"{last['content']}\n{page}")
        return replace(first, messages=(*before, asked))

    async def cookies(self) -> Mapping[str, str]:
        return await self._browser.cookies()

    async def close(self) -> None:
        await self._browser.close()

    @tool
    async def click(self, element: int) -> str:
        """Press a link, button, checkbox or other element.

        Args:
            element: number of the element.
        """
        return await self._act(self._session.click(element))

    @tool
    async def type(self, element: int, text: str, submit: bool = False) -> str:
        """Replace the text of a field.

        Args:
            element: number of the field.
            text: the new text.
            submit: then press Enter, which submits the form.
        """
        return await self._act(self._session.type(element, text, submit))

    @tool
    async def select(self, element: int, option: str) -> str:
        """Select an option of a field.

        Args:
            element: number of the field.
            option: text of the option.
        """
        return await self._act(self._session.select(element, option))

    @tool
    async def back(self) -> str:
        """Go to the page before this one."""
        return await self._act(self._session.back())

    @tool
    async def more(self) -> str:
        """Show the next part of a long page."""
        return await self._act(self._session.more())

    async def _act(self, acting: Awaitable[str]) -> str:
        """Run an action and return what the policy sees."""
        try:
            return await acting
        except ActionError as error:
            raise ToolError(str(error), error.kind) from error
        except (BrowserFault, SiteFault) as fault:
            raise ToolsFailed(one_line(fault)) from fault
