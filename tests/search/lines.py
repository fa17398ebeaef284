"""A policy without a model: it writes lines of one digit each, then ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.rollout.fake_generator import FakeGenerator

from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.types import SamplingParams, Task

TASK = Task("t", "1+1=")
DIGITS = "01234"


class Lines(FakeGenerator):
    """Draws each digit uniformly, with the noise of its position; greedily it repeats the last.

    Its prefix cache keeps every token: it reports how many were reused.

    Args:
        renderer: of a tokenizer with one token per character.
        depth: number of lines.

    Attributes:
        seen: all sequences of tokens that were ever computed.
    """

    def __init__(self, renderer: Renderer, depth: int) -> None:
        super().__init__(renderer, self._lines)
        self.seen: set[tuple[int, ...]] = set()
        self._text = renderer
        self._depth = depth

    def _lines(self, tokens: Sequence[int], params: SamplingParams, key: SampleKey) -> list[int]:
        assert key.origin is not None
        text = self._text.decode(tokens[key.origin :])
        begun = len(text)
        while len(text) < 2 * self._depth:
            noise = random.Random(f"{params.seed}/{key.name}/{key.sample}/{len(text)}")
            last = text[-2:-1] or "0"
            digit = noise.choice(DIGITS) if params.temperature else last
            text += "\n" if len(text) % 2 else digit
        return [*self._text.plain(text[begun:]), *self._text.stop_token_ids[:1]]

    async def generate(self, tokens: Sequence[int], *given: Any, **more: Any) -> Sampled:
        reused = max(
            (n for n in range(1, len(tokens)) if tuple(tokens[:n]) in self.seen), default=0
        )
        whole = tuple(tokens)
        self.seen |= {whole[:n] for n in range(1, len(whole) + 1)}
        sampled = await super().generate(tokens, *given, **more)
        whole += tuple(sampled.tokens[:-1])  # the last is sampled and not yet computed
        self.seen |= {whole[:n] for n in range(1, len(whole) + 1)}
        return replace(sampled, reused=reused)


class Scores:
    """A scorer by a function of the lines so far. It counts the characters that it reads."""

    def __init__(self, step: Callable[[tuple[str, ...]], float]) -> None:
        self.tokens = 0
        self._step = step

    def score(
        self, task: Task, completions: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        self.tokens += len(task.prompt) + sum(map(len, completions))
        return [
            [self._step(tuple(text[:end].split())) for end in some]
            for text, some in zip(completions, ends, strict=True)
        ]
