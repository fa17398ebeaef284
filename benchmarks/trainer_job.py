"""Work of `trainer.py`: one job file per case, and how a side measures a step.

A side gets the path of a job file (the fields of `Job`, as JSON). It trains `steps` times on the
same batch, and prints these lines:

    {"event": "start", "side": "trl", "versions": {...}, "trainable": 3300096, "parameters":
    3300096}
    {"event": "step", "seconds": 1.9, "rss_mb": 310.2, "grad_norm": 0.71}
    {"event": "tracked", "peak_mb": 290.3}

rss_mb is the peak RSS of the process in that step, minus its RSS before the step. One more step is
not timed and runs under PyTorch's profiler: peak_mb is the largest number of allocated bytes during
the step, minus those before it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine_limit import THREADS
from side_process import emit

LORA_SCALE = 2.0
"""alpha / rank of the adapters."""


@dataclass(frozen=True)
class Job:
    """Work of a side for one case.

    Attributes:
        model: folder of the model.
        prompts: token ids of each prompt.
        completions: token ids of each prompt's completions.
        logp: log-prob of each token of the completions under the model.
        rewards: reward of each completion.
        rows: trajectories in one forward and backward pass.
        steps: number of timed steps plus one for warm-up.
        checkpointing: none or full.
        lora_rank: rank of the adapters. 0: all weights train.
    """

    model: str
    prompts: list[list[int]]
    completions: list[list[list[int]]]
    logp: list[list[list[float]]]
    rewards: list[list[float]]
    rows: int
    steps: int
    checkpointing: str
    lora_rank: int
    threads: int = THREADS
    learning_rate: float = 1e-6

    @classmethod
    def load(cls, path: str) -> Job:
        """Read the job in the file at `path`."""
        return cls(**json.loads(Path(path).read_text()))

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(len(c) for group in self.completions for c in group)

    @property
    def tokens(self) -> int:
        """Tokens of all trajectories, each with its prompt."""
        return sum(
            len(prompt) + len(c)
            for prompt, group in zip(self.prompts, self.completions, strict=True)
            for c in group
        )


def draw_texts(
    vocabulary: int, prompts: int, samples: int, prompt_tokens: int, lengths: Sequence[int]
) -> tuple[list[list[int]], list[list[list[int]]], list[list[float]]]:
    """Random prompts, completions and rewards.

    Args:
        vocabulary: size of the vocabulary.
        prompts: number of prompts.
        samples: completions per prompt.
        prompt_tokens: length of each prompt.
        lengths: lengths of the completions of one prompt, repeated in turn.
    """
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(2, vocabulary) for _ in range(count)]

    starts = [draw(prompt_tokens) for _ in range(prompts)]
    texts = [
        [draw(lengths[(p * samples + k) % len(lengths)]) for k in range(samples)]
        for p in range(prompts)
    ]
    return starts, texts, [[rng.random() for _ in range(samples)] for _ in range(prompts)]


def plain_logp(
    folder: str, prompts: list[list[int]], completions: list[list[list[int]]]
) -> list[list[list[float]]]:
    """Log-prob of each token of the completions, by transformers alone, one text at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[list[list[float]]] = []
    with torch.no_grad():
        for prompt, group in zip(prompts, completions, strict=True):
            found.append([])
            for text in group:
                states = model.model(torch.tensor([prompt + text])).last_hidden_state[0]
                reads = states[len(prompt) - 1 : -1].split(64)
                targets = torch.tensor(text).split(64)
                found[-1].append(
                    [
                        value
                        for state, target in zip(reads, targets, strict=True)
                        for value in model.lm_head(state)
                        .log_softmax(-1)
                        .gather(-1, target[:, None])[:, 0]
                        .tolist()
                    ]
                )
    return found


class Meter:
    """Measures the steps of a side, and prints a line for each.

    Args:
        timed: number of timed steps, warm-up included.
    """

    def __init__(self, timed: int) -> None:
        self.timed = timed
        self.step = 0
        self.grad_norm = 0.0
        self._start = self._level = 0.0
        self._record: Any = None

    @property
    def steps(self) -> int:
        """Steps that a side makes: warm-up, timed, and one under the profiler."""
        return self.timed + 1

    def begin(self) -> None:
        """Start to measure a step. Call this before the step."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else the step would reuse freed memory unseen
        if self.step == self.timed:
            from torch.profiler import ProfilerActivity, profile

            self._record = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._record.__enter__()
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the present RSS
        self._level = _memory("VmRSS")
        self._start = time.perf_counter()

    def end(self) -> None:
        """Print the measurements of a step. Call this after the step."""
        seconds = time.perf_counter() - self._start
        if self._record is None:
            rss = _memory("VmHWM") - self._level
            emit("step", seconds=seconds, rss_mb=rss, grad_norm=self.grad_norm)
        else:
            self._record.__exit__(None, None, None)
            emit("tracked", peak_mb=_tracked_peak(self._record) / 1e6)
        self.step += 1

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context of one step, which is measured."""
        self.begin()
        yield
        self.end()


def _memory(field: str) -> float:
    """Value of a field in /proc/self/status, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def _tracked_peak(record: Any) -> int:
    """Largest number of allocated bytes during a profile, minus those allocated before it."""
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
