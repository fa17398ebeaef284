"""The sandbox that the code rewards of a process share."""

from __future__ import annotations

import asyncio
import atexit
from weakref import WeakKeyDictionary

from ..sandbox.sandbox import Sandbox

_sandboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


def shared_sandbox() -> Sandbox:
    """The sandbox of the running event loop. The first call starts it.

    Raises:
        UserError: if the machine cannot isolate as `environment.sandbox.isolation` requires.
    """
    loop = asyncio.get_running_loop()
    if loop not in _sandboxes:
        sandbox = Sandbox()
        atexit.register(sandbox.close)
        _sandboxes[loop] = sandbox
    return _sandboxes[loop]
