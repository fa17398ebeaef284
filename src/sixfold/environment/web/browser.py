"""Contract of the two backends: the HTML browser and Chromium."""

from __future__ import annotations

from typing import Protocol

from .dom import Document, Element


class BrowserFault(Exception):
    """The browser failed: an error of the infrastructure, not of the policy."""


class ActionError(ValueError):
    """An action that cannot be done. The policy is told why.

    Attributes:
        kind: what was wrong, in one word.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Browser(Protocol):
    """One tab on one site.

    Elements are those of the last `document()`. Each action waits until a navigation that it starts
    has ended. All methods raise BrowserFault or SiteFault if browser or site fail.
    """

    async def open(self, url: str) -> None:
        """Go to an address."""
        ...

    async def document(self) -> Document:
        """The page as it is now."""
        ...

    async def click(self, element: Element) -> None:
        """Press an element. Links and forms open in the same tab.

        Raises:
            ActionError: if the backend cannot do what the element asks for.
        """
        ...

    async def fill(self, field: Element, text: str) -> None:
        """Replace the text of a field."""
        ...

    async def choose(self, select: Element, option: Element) -> None:
        """Select an option. In a list that takes several, take it back if it was selected."""
        ...

    async def submit(self, form: Element) -> None:
        """Submit a form without pressing a button."""
        ...

    async def cookies(self) -> dict[str, str]:
        """Cookies of the site, by name."""
        ...

    async def close(self) -> None:
        """End the tab. It may be called twice."""
        ...
