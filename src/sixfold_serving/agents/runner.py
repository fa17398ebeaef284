"""Contract of runners, which run the agent of an episode."""

from __future__ import annotations

from typing import Protocol

from sixfold.types import Task


class Runner(Protocol):
    """Runs agents. Several calls of `run` may be in progress at the same time."""

    async def run(self, task: Task, address: str) -> object:
        """Run the agent for one episode until it ends. Cancelling the call ends the agent.

        Args:
            address: address of the session: the base URL without "/v1".

        Returns:
            A reward, a text for the reward functions, or None.

        Raises:
            EnvironmentFault: the agent has failed.
        """
        ...

    async def close(self) -> None:
        """End all processes of the runner."""
        ...
