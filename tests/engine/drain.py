"""Run an engine to its end with the prefix cache kept, as a server does."""

from __future__ import annotations

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence


def drain(engine: Engine) -> list[Sequence]:
    """Step until no sequence waits or runs. `Engine.run` would clear the prefix cache first."""
    finished: list[Sequence] = []
    while engine.busy:
        finished += engine.step()
    return finished
