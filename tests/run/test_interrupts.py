"""Signals of a run on several ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

from sixfold.ranks import Alone
from sixfold.run.interrupts import Interrupts


class OneOfTwo(Alone):
    """Rank that gets a signal while it exchanges objects with another rank."""

    size = 2
    signal_next = True

    def gather(self, value: Any) -> list[Any]:
        found = [value, 0]
        if self.signal_next:
            self.signal_next = False
            os.kill(os.getpid(), signal.SIGTERM)
        return found


def test_signal_that_arrives_while_ranks_agree_stops_them_at_the_next_step() -> None:
    with Interrupts(lambda line: None, OneOfTwo()) as interrupts:
        assert not interrupts.stopping()  # the other rank continues too
        assert interrupts.stopping()
    assert interrupts.exit_code == 143
