"""Contract of runners, which run an agent for one episode."""

from __future__ import annotations

from typing import Protocol

from ..types import Task


class Runner(Protocol):
    """Runs agents, several at the same time."""

    async def run(self, task: Task, address: str) -> object:
        """Run the agent for one episode, until it ends. If the call is cancelled, it is ended.

        Args:
            task: the task.
            address: address of the session. "/v1" is added for the base URL.

        Returns:
            A reward, or the text that reward functions score, or None.

        Raises:
            EnvironmentFault: the agent has failed.
        """
        ...

    async def close(self) -> None:
        """End what is left."""
        ...
