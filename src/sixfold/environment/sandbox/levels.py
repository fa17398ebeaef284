"""Levels of isolation, and the weakest one that the sandboxes of this process may have."""

from __future__ import annotations

from typing import Literal, get_args

Level = Literal["namespaces", "limits"]
"""Strongest first.

- namespaces: every job runs in user, mount, pid, network and ipc namespaces of its own, under a
  seccomp filter and resource limits.
- limits: resource limits only. A job can read the files of its user and use the network. This is
  not sufficient for hostile code.
"""

LEVELS: tuple[Level, ...] = get_args(Level)

_allowed: list[Level] = ["namespaces"]


def allow(level: Level) -> None:
    """Set the weakest level of later sandboxes, in this process and in its reward processes."""
    _allowed[:] = [level]


def allowed() -> Level:
    """The weakest level that sandboxes may have."""
    return _allowed[0]
