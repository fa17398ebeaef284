"""Contract of the two backends: the HTML browser and Chromium."""

from __future__ import annotations

from typing import Protocol

from .dom import Document, Element


class BrowserFault(Exception):
    """The browser failed. This is a fault of the infrastructure, not of the policy."""


class ActionError(ValueError):
    """Raised for an action that is not possible. The policy reads the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Browser(Protocol):
    """One tab on one site.

    Arguments of type Element come from the last call of `document`. If an action starts a
    navigation, it waits until the navigation has ended. Every method raises BrowserFault if the
    browser fails, and SiteFault if the site cannot be reached.
    """

    async def open(self, url: str) -> None:
        """Go to an address."""
        ...

    async def document(self) -> Document:
        """Read the current page."""
        ...

    async def click(self, element: Element) -> None:
        """Press an element. Links and forms open in the same tab.

        Raises:
            ActionError: if the backend does not support the element.
        """
        ...

    async def fill(self, field: Element, text: str) -> None:
        """Replace the text of a field."""
        ...

    async def choose(self, select: Element, option: Element) -> None:
        """Select an option. With `multiple`, deselect it if it is selected."""
        ...

    async def submit(self, form: Element) -> None:
        """Submit a form without pressing a button."""
        ...

    async def cookies(self) -> dict[str, str]:
        """Cookies of the site, by name."""
        ...

    async def close(self) -> None:
        """Close the tab. May be called twice."""
        ...
