"""Job of one side of `engine.py`: the work, the protocol of a side, and the loop that times it.

A side is a program `engine_NAME.py JOB`, JOB a file that holds a `Job` as JSON. It wraps its engine
in the two methods of `Side` and calls `serve`, which prints the lines that the harness reads
(`side_process.emit`):

    {"event": "start", "side": ..., "versions": {...}, "settings": {...}}
    {"event": "check", "answers": [[[{"tokens": [...], "logps": [...]}], ...], ...]}
    {"event": "run", "seconds": 8.1, "cpu_seconds": 15.9, "lengths": [[[128, ...], ...], ...]}
    {"event": "end", "peak_mb": 900}

The check is greedy, a run is sampled and timed. Lists are by turn, conversation and sample. Token
ids go in and come out. The number of tokens of each sample is drawn beforehand (`Profile`), so
every side does the same work: only its length ends a completion.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from side_process import emit
from tiny_qwen import Shape, forward_flops

SHAPE = Shape(vocabulary=1360)
MIXING = 10.0
"""So that the greedy tokens of a check depend on all that stands before them."""
CHECKED_CONVERSATIONS = 4
CHECKED_TOKENS = 16


@dataclass(frozen=True)
class Profile:
    """Shape of the work. Lengths in tokens.

    shared: tokens that all prompts begin with. prompt: a conversation's own tokens in each turn.
    completion: exact length, or with `mean` the cap of
    a geometric distribution. mean: its mean without the cap, 0 for exact lengths. turns: each goes
    on from all that was said before.
    """

    prompt: int
    completion: int
    shared: int = 0
    samples: int = 8
    turns: int = 1
    mean: int = 0

    def length(self, rng: random.Random) -> int:
        """Length of one completion."""
        if not self.mean:
            return self.completion
        length = 1
        while length < self.completion and rng.random() >= 1 / self.mean:
            length += 1
        return length


PROFILES = {
    "uniform": Profile(prompt=64, completion=128),
    "long-tail": Profile(prompt=64, completion=512, mean=64),
    "shared-prefix": Profile(prompt=16, completion=64, shared=512),
    "multi-turn": Profile(prompt=32, completion=64, samples=1, turns=4),
}


@dataclass(frozen=True)
class Conversation:
    """turns: the user's tokens, turn by turn. lengths: tokens wanted of each sample, by turn; of
    several turns each has one sample.
    """

    turns: list[list[int]]
    lengths: list[list[int]]

    def opening(self, tokens: int) -> Conversation:
        """The same with one sample a turn, of at most `tokens` tokens."""
        return Conversation(self.turns, [[min(tokens, lengths[0])] for lengths in self.lengths])


@dataclass(frozen=True)
class Job:
    """Job of one side. work: JSON file of conversations. settings: the side's own, over those in
    its file.
    """

    side: str
    profile: str
    model: str
    work: str
    repeats: int
    threads: int
    settings: dict[str, Any]

    @classmethod
    def load(cls, path: str) -> Job:
        """The job in the file at `path`."""
        return cls(**json.loads(Path(path).read_text()))

    def conversations(self) -> list[Conversation]:
        """The work, in order."""
        return [Conversation(**row) for row in json.loads(Path(self.work).read_text())]


@dataclass(frozen=True)
class Ask:
    """One prompt, everything that was said before it included. key: unique in the run. lengths:
    tokens wanted of each sample.
    """

    key: str
    prompt: list[int]
    lengths: list[int]

    def by_length(self) -> dict[int, list[int]]:
        """Length -> samples that get it: engines take several samples of a prompt in one request if
        they end alike.
        """
        groups: dict[int, list[int]] = {}
        for sample, length in enumerate(self.lengths):
            groups.setdefault(length, []).append(sample)
        return groups


@dataclass(frozen=True)
class Answer:
    """A completion. logps: of its tokens, as they were sampled; None where the side was not asked
    for them.
    """

    tokens: list[int]
    logps: list[float] | None


class Side(Protocol):
    """An engine under test."""

    def begin(self, greedy: bool) -> None:
        """A new run, not timed: forget all that is cached. Greedy runs must give log-probs, at
        temperature 1; others sample at temperature 1.
        """

    def answer(self, asks: list[Ask]) -> list[list[Answer]]:
        """Complete every ask of a turn; answers in the order of asks, by sample. In later turns an
        ask begins with an earlier one and its answer.
        """


def make_work(
    profile: Profile, conversations: int, vocabulary: int, seed: int = 0
) -> list[Conversation]:
    """The conversations of a profile, a function of the arguments alone."""
    rng = random.Random(seed)

    def text(tokens: int) -> list[int]:
        return rng.choices(range(2, vocabulary), k=tokens)

    shared = text(profile.shared)
    work = []
    for _ in range(conversations):
        turns = [text(profile.prompt) for _ in range(profile.turns)]
        lengths = [
            [profile.length(rng) for _ in range(profile.samples)] for _ in range(profile.turns)
        ]
        work.append(Conversation([shared + turns[0], *turns[1:]], lengths))
    return work


def save_work(work: Iterable[Conversation], path: Path) -> None:
    """Write the file that `Job.work` names."""
    path.write_text(json.dumps([asdict(c) for c in work]))


def needed_flops(shape: Shape, work: Sequence[Conversation], shared: int) -> int:
    """FLOPs that the work needs if nothing is computed twice: not what prompts share (`shared`
    tokens), nor a prompt for each of its samples, nor what was said in earlier turns. A
    completion's last token is predicted, and fed forward only if another turn follows.
    """
    total = forward_flops(shape, 0, shared, predictions=0)
    for conversation in work:
        known = length = 0
        for turn, lengths in zip(conversation.turns, conversation.lengths, strict=True):
            end = length + len(turn)
            total += forward_flops(shape, max(known, shared), end, predictions=1)
            total += sum(forward_flops(shape, end, end + n - 1, predictions=n - 1) for n in lengths)
            known, length = end + lengths[0] - 1, end + lengths[0]
    return total


def play(
    side: Side, work: Sequence[Conversation], greedy: bool
) -> tuple[float, list[list[list[Answer]]]]:
    """Run the work on a side -> (seconds, answers by turn, conversation and sample). All
    conversations go through a turn together.
    """
    side.begin(greedy)
    start = time.perf_counter()
    history: list[list[int]] = [[] for _ in work]
    answers = []
    for turn in range(len(work[0].turns)):
        asks = [
            Ask(f"{i}/{turn}", history[i] + c.turns[turn], c.lengths[turn])
            for i, c in enumerate(work)
        ]
        answers.append(side.answer(asks))
        history = [
            ask.prompt + given[0].tokens for ask, given in zip(asks, answers[-1], strict=True)
        ]
    return time.perf_counter() - start, answers


def serve(job: Job, side: Side, versions: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """Check, warm up with one run that is not timed, run, and report."""
    work = job.conversations()
    emit("start", side=job.side, versions=versions, settings=settings)
    _, answers = play(
        side, [c.opening(CHECKED_TOKENS) for c in work[:CHECKED_CONVERSATIONS]], greedy=True
    )
    emit("check", answers=[[[asdict(a) for a in samples] for samples in turn] for turn in answers])
    play(side, work, greedy=False)
    gc.collect()
    # or a look through all that imports made, 0.2 s, would fall into some run of some side
    gc.freeze()
    for _ in range(job.repeats):
        before = time.process_time()
        seconds, answers = play(side, work, greedy=False)
        emit(
            "run",
            seconds=seconds,
            cpu_seconds=time.process_time() - before,
            lengths=[[[len(a.tokens) for a in samples] for samples in turn] for turn in answers],
        )
    emit("end", peak_mb=peak_mb())


def peak_mb() -> float:
    """Most memory this process has held. Not `getrusage`: its maximum outlives exec, and so begins
    at the harness's own.
    """
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) / 1024
