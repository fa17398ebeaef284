"""The engine's side of `switches.py`: one engine under some settings, the same work again and
again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from engine_job import Conversation, make_work, peak_mb
from switches_job import EngineWork, Job, emit_all

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence
from sixfold.engine.speculative import Speculation
from sixfold.kernels.cpu.engine_kernels import cpu_kernels
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig
from sixfold.types import SamplingParams

BLOCK = 16
Key = tuple[str, int]


@dataclass
class Waits:
    """Longest wait between two tokens of a running sequence. tokens: computed for other sequences.
    seconds: on the clock.
    """

    tokens: int = 0
    seconds: float = 0.0
    _tokens: int = 0
    _seconds: float = 0.0

    def step(self, running: bool, tokens: int, seconds: float, decoded: bool) -> None:
        """Count a step. running: something ran when it began. decoded: and went further in it."""
        self._tokens, self._seconds = (
            (self._tokens + tokens, self._seconds + seconds) if running else (0, 0.0)
        )
        if decoded or not running:
            self.tokens, self.seconds = (
                max(self.tokens, self._tokens),
                max(self.seconds, self._seconds),
            )
            self._tokens, self._seconds = 0, 0.0


@dataclass
class Driven:
    """One run: what ended, and the waits. Where it was watched, also the sequences that ran
    together at most, and slots held and empty ones, in sum over the steps."""

    done: dict[Key, Sequence] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)
    most_running: int = 0
    slots: int = 0
    empty: int = 0

    def watch(self, engine: Engine) -> None:
        """Look how full the engine is."""
        usage = engine.usage()
        self.most_running = max(self.most_running, usage.running)
        self.slots, self.empty = (
            self.slots + usage.used * engine.scheduler.blocks.block_size,
            self.empty + usage.wasted_slots,
        )


class EngineSide:
    """An engine with the settings of `Engine`, and two of this benchmark: `k`, guesses by n-grams,
    and `apart`, each sample a request of its own.
    """

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        assert isinstance(job.work, EngineWork)
        self.work, self.conversations = (
            job.work,
            make_work(job.work.profile, job.work.prompts, vocabulary(job.model)),
        )
        self.apart, k = settings.pop("apart", False), settings.pop("k", 0)
        sequences = sum(len(c.lengths[0]) for c in self.conversations)
        running = job.work.running or sequences
        blocks = -(-job.work.longest // BLOCK) + 1
        room = max(job.work.longest, int(job.work.room * running * blocks * BLOCK))
        model = CausalLM(load_policy(ModelConfig(path=job.model), seed=0, device="cpu").model)
        speculation = Speculation(k=k) if k else None
        self.engine = Engine(
            model,
            **{
                "kv_tokens": room,
                "max_running": running,
                "speculation": speculation,
                **self._slabs(settings, room),
            },
        )

    def _slabs(self, settings: dict[str, Any], room: int) -> dict[str, Any]:
        """`block_size` = 0: a block as long as a sequence may get, in as many tokens (the engine
        adds one block).
        """
        if settings.get("block_size") != 0:
            return settings
        slab = self.work.longest
        return settings | {
            "block_size": slab,
            "kv_tokens": max(slab, (room + BLOCK) // slab * slab - slab),
        }

    def add(self) -> dict[Key, int]:
        """Queue everything -> the length that each sample is to have."""
        for i, c in enumerate(self.conversations):
            for samples in self._requests(c):
                most = self.work.profile.completion
                self.engine.add(
                    str(i), c.turns[0], SamplingParams(most, self.work.temperature, seed=1), samples
                )
        return {
            (str(i), k): n
            for i, c in enumerate(self.conversations)
            for k, n in enumerate(c.lengths[0])
        }

    def _requests(self, conversation: Conversation) -> list[list[int]]:
        samples = list(range(len(conversation.lengths[0])))
        return [[k] for k in samples] if self.apart else [samples]

    def run(self, watched: bool) -> Driven:
        """The work from an empty prefix cache to the end."""
        engine, stats, driven = self.engine, self.engine.stats, Driven()
        engine.prefixes.clear()
        wanted = self.add()
        while engine.busy:
            running, rows = bool(engine.scheduler.running), stats.decode_rows
            computed, start = stats.prefill_tokens + stats.recomputed_tokens, time.perf_counter()
            ended = engine.step()
            for s in [
                s
                for s in engine.scheduler.running
                if len(s.logp) == wanted[s.request.key, s.sample]
            ]:
                engine.end(s, "stop")
                ended.append(s)
            driven.done |= {(s.request.key, s.sample): s for s in ended}
            tokens = stats.prefill_tokens + stats.recomputed_tokens - computed
            driven.waits.step(
                running, tokens, time.perf_counter() - start, stats.decode_rows > rows
            )
            if watched:
                driven.watch(engine)
        if {key: len(s.logp) for key, s in driven.done.items()} != wanted:
            raise RuntimeError("other numbers of tokens than were asked for")
        return driven

    def counters(self, driven: Driven) -> dict[str, float]:
        """Of the engine's first run."""
        stats, blocks = self.engine.stats, self.engine.scheduler.blocks
        shares = {
            name: getattr(stats, name)
            for name in ("hit_rate", "acceptance_rate", "tokens_per_pass")
        }
        shares["padding_waste"] = 1 - stats.decode_rows / max(1, stats.decode_slots)
        return asdict(stats) | shares | {
            "tokens": sum(len(s.logp) for s in driven.done.values()),
            "most_running": driven.most_running,
            "empty_slots": driven.empty / driven.slots,
            "waited_tokens": driven.waits.tokens,
            "kv_bytes": sum(side.nbytes for side in self.engine.runner.cache.tensors()),
            "cache_tokens": blocks.count * blocks.block_size,
            "kernels": float(cpu_kernels() is not None),
        }  # fmt: skip


def vocabulary(folder: str) -> int:
    """Of the model in a folder."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).vocab_size)


def lines(job: Job) -> Iterator[dict[str, Any]]:
    """The lines of this side."""
    torch.set_num_threads(job.threads)
    side = EngineSide(job, dict(job.settings))
    driven = side.run(watched=True)
    order = sorted(driven.done)
    yield {
        "event": "check",
        "tokens": [
            driven.done[key].tokens[len(driven.done[key].request.prompt) :] for key in order
        ],
        "logps": [driven.done[key].logp for key in order],
        "counters": side.counters(driven),
    }
    for _ in range(job.repeats):
        start = time.perf_counter()
        driven = side.run(watched=False)
        yield {
            "event": "run",
            "seconds": time.perf_counter() - start,
            "pause": driven.waits.seconds,
        }
    yield {"event": "end", "peak_mb": peak_mb()}


if __name__ == "__main__":
    emit_all(lines)
