"""A thread that runs one job at a time, so that training goes on while a checkpoint is written."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..processes.deadline import Deadline


class Background:
    """Runs one job at a time in a thread.

    The error of a job is kept until `check` or `wait` raises it. The thread ends with the process.

    Args:
        deadline: longest wait for the end of a job.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._patience = deadline.seconds
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Wait for the previous job, then start a job.

        Raises:
            BaseException: as `wait` does. The new job is then not started.
        """
        self.wait()

        def run() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  boundary: `wait` raises it
                self._error = error

        self._thread = threading.Thread(target=run, name=self._deadline.who, daemon=True)
        self._thread.start()

    def check(self) -> bool:
        """As `wait`, but returns False at once while a job runs."""
        return bool(self._thread and not self._thread.is_alive()) and self.wait()

    def wait(self) -> bool:
        """Wait until no job runs.

        Returns:
            True if a job has ended without an error. False if no job was started since the last
            call.

        Raises:
            BaseException: the error of the job, once.
            NoAnswer: if the job does not end in time. Later calls do not wait for it.
        """
        if self._thread is None:
            return False
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._patience = 0.0
            raise self._deadline.missed()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
        return True
