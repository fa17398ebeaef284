"""A process that trains without end beside `sixfold plan --measure` (`processes/program.py`)."""

from __future__ import annotations

from sixfold.processes.program import Requests

from .measure_cases import WIDE, TrainerCases

TOKENS = 2048
"""Tokens of its micro-batches."""


def serve(requests: Requests) -> None:
    """Answer the first request once it computes, and go on until it is ended."""
    next(requests)
    train = TrainerCases(WIDE.build("cpu"), "cpu", None).train(TOKENS)
    train()
    requests.answer(b"")
    while True:
        train()
