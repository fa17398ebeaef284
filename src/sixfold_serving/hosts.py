"""Check of the Host header for a server on a loopback address.

A web page that the user visits can let its own host name resolve to 127.0.0.1 (DNS rebinding). The
browser then treats this server as the page's own and lets the page read the answers. Such requests
have the page's host name in the Host header.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1, localhost and names that end with .localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class AllowedHosts:
    """Allowed names in the Host header.

    Args:
        names: names in addition to loopback addresses and `localhost`. A port is ignored.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(host_name(name) for name in names)

    def admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """True if every Host header has an allowed name.

        A request without a Host header is allowed, because browsers always send one.
        """
        hosts = [host_name(value.decode("latin-1")) for key, value in headers if key == b"host"]
        return all(is_loopback(host) or host in self._names for host in hosts if host)


def host_name(header: str) -> str:
    """A Host header without its port, in lower case: "[::1]:80" is "::1"."""
    header = header.strip().lower()
    if header.startswith("["):
        address, _, rest = header[1:].partition("]")
        return header if rest.strip(":0123456789") else address
    return header.partition(":")[0].rstrip(".")
