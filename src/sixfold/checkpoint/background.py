"""A thread that runs one job at a time, so that training goes on while a checkpoint is written."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import RunFailed


class Background:
    """Runs one job at a time in a thread.

    The error of a job is kept until `check` or `wait` raises it. The thread ends with the process.

    Args:
        name: the thread's task, as the subject of a sentence, for messages.
        seconds: longest wait for the end of a job.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
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

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a job that has failed. Returns at once while a job runs."""
        if self._thread and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until no job runs.

        Raises:
            BaseException: the error of the job, once.
            RunFailed: if the job does not end in time.
        """
        if self._thread is None:
            return
        self._thread.join(self._seconds)
        if self._thread.is_alive():
            waited, self._seconds = self._seconds, 0.0  # do not wait so long a second time
            raise RunFailed(
                f"{self._name} did not answer within {waited:g} s. Check the disk of run.dir"
            )
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
