"""A program in another process that this one has connected to, but not started."""

from __future__ import annotations

import os
import socket

from . import program
from .child import ChildEnded, Peer


class Connection(Peer):
    """A connection to a program by a Unix socket.

    Args:
        path: path of the socket.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(path)
            made.setblocking(False)
            # Two descriptors: one poll waits for both ends.
            super().__init__(os.dup(made.fileno()), os.dup(made.fileno()))

    def close(self, grace_s: float = program.GRACE_S) -> None:
        """Close the connection. The program itself goes on."""
        if self.closed:
            return
        self.closed = True
        os.close(self.requests)
        os.close(self.replies)

    def _death(self) -> ChildEnded:
        return ChildEnded("has closed the connection")
