"""Sockets of connections have TCP_NODELAY. Nagle's algorithm would delay each answer by 40 ms."""

from __future__ import annotations

import socket

import pytest

from sixfold_serving.connections import listener


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_connections_do_not_wait_for_acknowledgements(host: str) -> None:
    try:
        listening = listener(host, 0)
    except OSError:
        if host != "::1":
            raise
        pytest.skip("this machine has no IPv6")
    with listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
