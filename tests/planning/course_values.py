"""Reference values of the course's widgets, for the tests of the planner and of the labs."""

from __future__ import annotations

STEP_SECONDS = (
    (7, 16, 1024, "disaggregated", 12.38, "rollout"),
    (7, 16, 1024, "colocated", 15.18, "rollout"),
    (7, 16, 1024, "async", 11.08, "rollout"),
    (7, 16, 8192, "disaggregated", 125.6, "rollout"),
    (70, 4, 1024, "disaggregated", 61.2, "sync"),
)
"""L22a: billions of parameters, samples per prompt, length, topology, seconds, longest phase."""

MEMORY_GB = (
    (7, 8, True, 32.9, True),
    (7, 8, False, 153.2, False),
    (7, 1, True, 143.2, False),
    (7, 2, True, 80.2, False),
    (70, 16, True, 153.9, False),
    (70, 64, True, 94.8, False),
)
"""L22: billions of parameters, devices, checkpointing, GB per device of the trainer, fits 80 GB."""

STEPS_PER_HOUR = (
    ((20, 15, 2), (97, 164, 180), 1.85),
    ((60, 10, 5), (48, 55, 60), 1.25),
    ((10, 60, 20), (40, 45, 60), 1.50),
)
"""L19: seconds of rollout, training and sync; steps per hour colocated, disaggregated and async;
speed-up of async."""

TOPOLOGY_STEPS = (
    ("colocated", 31, 1.0, 0.0),
    ("disaggregated", 23, 1.35, 0.52),
    ("async", 20, 1.55, 0.60),
)
"""L22c with rollout 20 s, training 8 s and sync 3 s: topology, seconds of a step, speed-up, share
of the step in which the trainer waits (colocated: it does not)."""
