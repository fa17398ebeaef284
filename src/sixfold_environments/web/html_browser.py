"""Browser backend without scripts: it parses pages and follows links and forms in this process.

`http.cookiejar` keeps the cookies.
"""

from __future__ import annotations

import asyncio
import email.message
import urllib.request
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import quote, urldefrag, urljoin, urlsplit

from .browser import ActionError
from .dom import Document, Element
from .forms import (
    check,
    choose,
    fields_of,
    form_of,
    invalid_field,
    is_disabled,
    is_submit,
    reset_fields,
    sanitise,
    skips_validation,
    submission,
)
from .html_parser import parse_page
from .site import Request, Response, Site, decode_response, refusal

ACCEPT = "text/html,application/xhtml+xml,*/*;q=0.8"

_KEPT = "%/:=&?~#+!$,;'@()*[]"
"""Characters of an address that are sent as they are."""

SHEETS = 8
"""Maximum number of linked style sheets that are loaded per page."""


class HtmlBrowser:
    """Browser without scripts."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._jar = CookieJar(DefaultCookiePolicy(rfc2965=False))
        self._page = Document("about:blank", Element("html"))

    async def open(self, url: str) -> None:
        await self._go("GET", url)

    async def document(self) -> Document:
        return self._page

    async def close(self) -> None:
        """Do nothing: this backend holds no resources."""

    async def click(self, element: Element) -> None:
        if element.tag == "a" and element.has("href"):
            await self._follow(element.get("href").strip())
        elif element.tag == "summary" and element.parent is not None:
            details = element.parent.attributes
            if details.pop("open", None) is None:
                details["open"] = ""
        elif element.tag in ("button", "input") and not is_disabled(element):
            await self._press(element)

    async def _press(self, field: Element) -> None:
        form = form_of(field)
        if field.tag == "input" and field.kind == "checkbox":
            field.checked = not field.checked
        elif field.tag == "input" and field.kind == "radio":
            check(field)
        elif form is not None and is_submit(field):
            await self._submit(form, field)
        elif form is not None and field.kind == "reset":
            reset_fields(iter(fields_of(form)))

    async def fill(self, field: Element, text: str) -> None:
        field.value = sanitise(field, text)

    async def choose(self, select: Element, option: Element) -> None:
        choose(select, option)

    async def submit(self, form: Element) -> None:
        await self._submit(form, None)

    async def cookies(self) -> dict[str, str]:
        return {cookie.name: cookie.value or "" for cookie in self._jar}

    async def _submit(self, form: Element, submitter: Element | None) -> None:
        if not skips_validation(form, submitter) and invalid_field(form) is not None:
            return
        sent = submission(self._page, form, submitter)
        if sent is not None:
            await self._go(sent.method, self._absolute(sent.address), sent.kind, sent.body)

    async def _follow(self, href: str) -> None:
        scheme = href.partition(":")[0].lower()
        if scheme == "javascript":
            raise ActionError("unsupported", "the link runs a script, which this browser does not")
        if scheme in ("mailto", "tel", "data", "blob"):
            return
        url = self._absolute(href)
        here, there = urldefrag(self._page.url), urldefrag(url)
        if "#" in href and here.url == there.url:  # a fragment of the same page
            return
        await self._go("GET", url)

    def _absolute(self, address: str) -> str:
        return _join(_join(self._page.url, self._page.base()), address)

    async def _go(self, method: str, url: str, kind: str = "", body: bytes = b"") -> None:
        """Request a page, follow its redirects, and make it the current page."""
        while True:
            given = await self._fetch(method, url, kind, body)
            if not given.is_redirect:
                break
            if given.status == 303 or (given.status in (301, 302) and method == "POST"):
                method, kind, body = "GET", "", b""
            fragment = urldefrag(url).fragment
            url = _join(url, given.header("location"))
            if fragment and not urldefrag(url).fragment:
                url = f"{url}#{fragment}"
        if given.status in (204, 205):
            return
        text = decode_response(given)
        root = parse_page(text)
        if sheets := [await self._sheet(address) for address in _sheets(url, root)[:SHEETS]]:
            root = parse_page(text, sheets)
        number = self._page.number + 1
        self._page = Document(url, root, given.status, number, posted=method == "POST")

    async def _sheet(self, url: str) -> str:
        """Text of a style sheet, or "" if it cannot be loaded."""
        given = await self._fetch("GET", url, accept="text/css,*/*;q=0.1")
        is_sheet = given.header("content-type").partition(";")[0].strip() == "text/css"
        return decode_response(given) if is_sheet and given.status == 200 else ""

    async def _fetch(
        self, method: str, url: str, kind: str = "", body: bytes = b"", *, accept: str = ACCEPT
    ) -> Response:
        """Send one request, with the cookies of the site."""
        if not self._site.holds(url):
            return refusal(url)
        address, came_from = quote(urldefrag(url).url, safe=_KEPT), self._page.url
        headers = {
            "accept": accept,
            "accept-encoding": "identity",
            "host": urlsplit(address).netloc,
        }
        if self._site.holds(came_from):
            headers["referer"] = urldefrag(came_from).url
        if method == "POST":
            headers["content-type"] = kind
            headers["origin"] = self._site.origin.removesuffix(":80")
        asked = urllib.request.Request(address, method=method)
        self._jar.add_cookie_header(asked)
        if cookie := asked.get_header("Cookie"):
            headers["cookie"] = cookie
        request = Request(method, address, headers, body)
        if self._site.quick:
            given = self._site.fetch(request)
        else:
            given = await asyncio.to_thread(self._site.fetch, request)
        if given.header("set-cookie"):
            self._jar.extract_cookies(_Headers(given), asked)  # type: ignore[arg-type]
        return given


@dataclass
class _Headers:
    """A response in the form that `CookieJar` reads."""

    given: Response

    def info(self) -> email.message.Message:
        message = email.message.Message()
        for name, value in self.given.headers:
            message[name] = value
        return message


def _join(base: str, address: str) -> str:
    """Absolute address. One that cannot be parsed becomes an address outside every site."""
    try:
        return urljoin(base, address)
    except ValueError:
        return "invalid:"


def _sheets(url: str, root: Element) -> list[str]:
    """Addresses of the style sheets that a page links."""
    base = _join(url, Document(url, root).base())
    return [
        _join(base, e.get("href").strip())
        for e in root.elements()
        if e.tag == "link"
        and "stylesheet" in e.get("rel").lower().split()
        and "alternate" not in e.get("rel").lower().split()
        and e.get("media").strip().lower() in ("", "all", "screen")
        and e.has("href")
    ]
