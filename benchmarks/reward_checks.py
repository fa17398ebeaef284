"""Time that 512 cheap reward checks take: `python benchmarks/reward_checks.py`. About 16 ms on an
idle core.
"""

from __future__ import annotations

import time

from sixfold.checks.environment import Environment
from sixfold.environment.arithmetic import arithmetic_tasks
from sixfold.types import Group, Task, Trajectory

SAMPLES, TASKS, ROUNDS = 8, 64, 20


def unscored(task: Task) -> Group:
    """A group of answers that no reward has looked at."""
    samples = [
        Trajectory.one_turn(task.id, k, [1], [7], [-1.0], [0], "stop", text=task.trace or "")
        for k in range(SAMPLES)
    ]
    return Group(task, samples)


def main() -> None:
    """Print the quickest and the median time of one step's checks."""
    tasks = arithmetic_tasks(TASKS, terms=2, digits=3, seed=0)
    seconds = []
    with Environment(["arithmetic"]) as environment:
        environment.score([unscored(task) for task in tasks])  # starts the process
        for _ in range(ROUNDS):
            groups = [unscored(task) for task in tasks]
            start = time.perf_counter()
            environment.score(groups)
            seconds.append(time.perf_counter() - start)
    seconds.sort()
    print(
        f"{TASKS * SAMPLES} checks: quickest {1000 * seconds[0]:.1f} ms, median"
        f" {1000 * seconds[ROUNDS // 2]:.1f} ms of {ROUNDS} rounds"
    )


if __name__ == "__main__":
    main()
