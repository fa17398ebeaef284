"""The tree that every search grows: chains of sampled tokens, their scores, and what they cost.

Methods only extend chains and score them. Branches share their beginning: the generator is asked to
continue the tokens of a chain, so an engine with a prefix cache computes them once. All noise is
named by (seed, task, number of the call, position), so the same search gives the same chains.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import NamedTuple

from sixfold.engine.prefix_cache import PrefixCache
from sixfold.errors import UserError
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Generator, Sampled, SampleKey
from sixfold.rollout.thread_settings import in_thread
from sixfold.step_scorer import StepScorer
from sixfold.steps import Steps, last_tokens
from sixfold.types import FinishReason, SamplingParams, Task, Trajectory

from .aggregate import Aggregate
from .shared_scorer import SharedScorer

BLOCK = 16
"""Tokens of a block of the prefix cache, if the generator does not say."""

UNKNOWN_RATE = 2.0
"""Tokens of the scorer's model per token of the policy, before the first score: it may have another
tokenizer, and it adds the ends of turns or marks of steps.
"""


PIECE = 32
"""Tokens after which the text of a step is read, if a user's function says where it ends."""


class Span(NamedTuple):
    """How far a chain is extended: to a stop string, by a number of tokens, or to a step's end.

    Attributes:
        stops: strings that end the span, besides those that end a completion.
        tokens: most tokens. None: up to the longest completion.
        read: True if the tree's way to end steps reads the text. The span ends after the token with
            the first end that has text after it; further tokens are dropped.
    """

    stops: tuple[str, ...] = ()
    tokens: int | None = None
    read: bool = False


WHOLE = Span()
"""To the end of the completion."""


@dataclass(frozen=True)
class Cost:
    """Model tokens of a search.

    Attributes:
        prefilled: tokens of prompts and prefixes that the policy computed.
        sampled: tokens that the policy sampled.
        scored: tokens that the scorer's model computed.
    """

    prefilled: int = 0
    sampled: int = 0
    scored: int = 0

    @property
    def total(self) -> int:
        return self.prefilled + self.sampled + self.scored


@dataclass(frozen=True, eq=False)
class Chain:
    """A completion so far.

    Attributes:
        tokens: token ids after the prompt, as are `logp` and `version`.
        logp: log-prob of each; 0 for tokens that the search has written.
        version: version of the weights that sampled each; -1 for written ones.
        text: the completion as text. It ends before the token or stop string that ends it.
        finish: why it ended. None: it can be extended.
        scores: scores of its steps. Empty: not scored.
    """

    tokens: tuple[int, ...] = ()
    logp: tuple[float, ...] = ()
    version: tuple[int, ...] = ()
    text: str = ""
    finish: FinishReason | None = None
    scores: tuple[float, ...] = ()


class _Extension(NamedTuple):
    """An extended chain, and the chain before each piece that was sampled, with the piece."""

    chain: Chain
    pieces: list[tuple[Chain, Sampled]]


class Tree:
    """Chains of one task.

    Args:
        generator: samples the policy.
        renderer: encodes the prompt and decodes completions.
        task: the task.
        params: sampling of whole completions. `max_tokens` bounds a completion.
        step: how far a step goes.
        steps: where the steps of a text end.
        aggregate: makes one value of the scores of a chain.
        scorer: scores chains. None: the method needs no scores.
        by_step: False: the scorer scores completions as a whole (an outcome reward model).
        stops: strings that end a completion.
        budget: most model tokens. None: no limit.
        prompt: token ids of the prompt. None: as the renderer encodes the task.

    Attributes:
        prompt: token ids of the task's prompt.
        cost: model tokens so far.
        refused: texts that the scorer has refused.
        evicted: True if a prefix was computed again that the engine's cache would have held, had
            it had room.
    """

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        task: Task,
        params: SamplingParams,
        *,
        step: Span,
        steps: Steps,
        aggregate: Aggregate,
        scorer: StepScorer | None,
        by_step: bool,
        stops: Sequence[str],
        budget: int | None,
        prompt: Sequence[int] | None = None,
    ) -> None:
        self.step = step
        self.prompt = renderer.encode(task) if prompt is None else list(prompt)
        self.cost = Cost()
        self.refused = 0
        self.evicted = False
        self.budget = budget
        self._generator = generator
        self._renderer = renderer
        self._task = task
        self._params = params
        self._steps = steps
        self._aggregate = aggregate
        self._scorer = scorer
        self._by_step = by_step
        self._stops = tuple(stops)
        block = BLOCK
        self._cache: PrefixCache | None = None
        if isinstance(generator, EngineGenerator):
            block = generator.engine.scheduler.blocks.block_size
            self._cache = generator.engine.prefixes
        # Most tokens of a cached prefix that are computed again: its last block, or a text too
        # short to be found in the cache.
        self._recomputed = 2 * block
        self._calls = 0
        self._reuses = False
        self._computed: set[int] = set()  # hashes of all beginnings that were computed
        self._rates: list[float] = []

    @property
    def left(self) -> float:
        """Model tokens that are left."""
        return math.inf if self.budget is None else self.budget - self.cost.total

    def most(self, chain: Chain) -> int:
        """Most model tokens that the completion of a chain takes, with its score."""
        return self._need(chain, self._room(chain, WHOLE))

    async def extend(
        self,
        chains: Sequence[Chain],
        count: int = 1,
        span: Span = WHOLE,
        *,
        greedy: bool = False,
        spare: int = 0,
    ) -> list[list[Chain]]:
        """Sample extensions of chains, all at once.

        Those that could exceed the budget are not sampled. If not even one fits, a whole completion
        gets the tokens that are left; it remains unfinished if they do not suffice.

        Args:
            chains: the chains. Finished ones are not extended.
            count: extensions of each.
            span: how far.
            greedy: take the most probable tokens.
            spare: tokens of the budget to leave.

        Returns:
            Extensions of each chain, at most `count`.
        """
        calls: list[tuple[int, int]] = []
        left = self.left - spare
        open_ = [at for at, c in enumerate(chains) if not c.finish and self._room(c, span) > 0]
        asked = open_ * count
        for at in asked:
            room = self._room(chains[at], span)
            need = self._need(chains[at], room, PIECE if span.read else room)
            if need > left:
                rest = 0 if calls or span != WHOLE else self._last_room(chains[at], left)
                calls += [(at, rest)] if rest > 0 else []
                break
            calls.append((at, room))
            left -= need
        first, self._calls = self._calls, self._calls + len(calls)
        made = await asyncio.gather(
            *(
                self._extension(chains[at], room, span, first + number, greedy)
                for number, (at, room) in enumerate(calls)
            )
        )
        pieces = [
            (chain, one, self._known([*self.prompt, *chain.tokens], number > 0))
            for extension in made
            for number, (chain, one) in enumerate(extension.pieces)
        ]
        # Those that computed a shared prefix before those that reused it.
        for chain, one, known in sorted(pieces, key=lambda piece: piece[1].reused):
            self._count(chain, one, known)
        found: list[list[Chain]] = [[] for _ in chains]
        for (at, _), extension in zip(calls, made, strict=True):
            found[at].append(extension.chain)
        return found

    async def score(self, chains: Sequence[Chain]) -> list[Chain]:
        """The chains with scores of their steps. Equal texts are scored once.

        A text that the scorer refuses, such as one with special tokens, has the score 0.
        """
        if self._scorer is None:
            raise ValueError("this search has no scorer")
        fresh = {chain.text: chain for chain in chains if chain.text and not chain.scores}
        known: dict[str, tuple[float, ...]] = {"": (0.0,)}
        if fresh:
            before = self._scorer.tokens
            ends = {t: self._steps.ends(t) if self._by_step else [len(t)] for t in fresh}
            thread = self._scorer.thread if isinstance(self._scorer, SharedScorer) else None
            known |= await in_thread(self._scores, ends, executor=thread)
            used = self._scorer.tokens - before
            self.cost = replace(self.cost, scored=self.cost.scored + used)
            read = len(self.prompt) + sum(len(chain.tokens) for chain in fresh.values())
            self._rates.append(used / read)
        return [c if c.scores else replace(c, scores=known[c.text]) for c in chains]

    def value(self, chain: Chain) -> float:
        """One value of the scores of a chain."""
        return self._aggregate(chain.scores)

    def best(self, chains: Sequence[Chain]) -> Chain:
        """The scored chain with the largest value, the first of equal ones."""
        return max(chains, key=self.value)

    def before_step(self, chain: Chain, number: int) -> Chain:
        """The beginning of a chain, without its step `number` (from 0) and all later ones."""
        return self.cut(chain, self._steps.ends(chain.text)[number - 1] if number else 0)

    def cut(self, chain: Chain, characters: int) -> Chain:
        """The tokens of a chain within the first characters of its text, without its end token.

        A token across the boundary is deleted.
        """
        count, decode, kept = 0, self._renderer.decode, chain.text[:characters]
        if characters:
            count = last_tokens([characters], chain.text, chain.tokens, decode)[0] + 1
        while not kept.startswith(text := decode(chain.tokens[:count])):
            count -= 1
        return Chain(chain.tokens[:count], chain.logp[:count], chain.version[:count], text)

    def written(self, chain: Chain, text: str) -> Chain:
        """A chain to which the search adds text, which the policy did not sample.

        A text that is one added token of the tokenizer, such as a think tag, is that token.
        """
        known = self._renderer.tokenizer.get_added_vocab().get(text)
        tokens = self._renderer.suffix_text(chain.tokens, text).tokens if known is None else [known]
        whole = (*chain.tokens, *tokens)
        return Chain(
            whole,
            (*chain.logp, *[0.0] * len(tokens)),
            (*chain.version, *[-1] * len(tokens)),
            self._renderer.decode(whole),
            "length" if len(whole) >= self._params.max_tokens else None,
        )

    def trajectory(self, chain: Chain, sample: int = 0) -> Trajectory:
        """A chain as an episode of one turn, for the environment."""
        return Trajectory.one_turn(
            self._task.id,
            sample,
            self.prompt,
            chain.tokens,
            chain.logp,
            chain.version,
            chain.finish or "length",
            text=chain.text,
            opened=self._renderer.opened(self.prompt) or self._task.prefill,
        )

    def _scores(self, ends: Mapping[str, Sequence[int]]) -> dict[str, tuple[float, ...]]:
        """Scores of the steps of each text, given where they end."""
        assert self._scorer is not None
        try:
            found = self._scorer.score(self._task, [*ends], [*ends.values()])
        except UserError:
            if len(ends) > 1:  # one of them: ask for each alone
                return {t: s for one in ends for t, s in self._scores({one: ends[one]}).items()}
            self.refused += 1
            return dict.fromkeys(ends, (0.0,))
        return {text: tuple(scores) for text, scores in zip(ends, found, strict=True)}

    def _known(self, tokens: Sequence[int], goes_on: bool = False) -> int:
        """Length of the longest beginning of the tokens that this search has computed.

        Args:
            tokens: a prompt with a chain.
            goes_on: the chain was sampled without a pause: all but its newest token is computed.
        """
        if goes_on:
            return len(tokens) - 1
        begun = enumerate(_beginnings(tokens))
        return next((at for at, seen in begun if seen not in self._computed), len(tokens))

    @property
    def _rate(self) -> float:
        """Most tokens of the scorer's model per token of the policy. 0 without a scorer."""
        return max(self._rates, default=UNKNOWN_RATE) if self._scorer else 0.0

    def _room(self, chain: Chain, span: Span) -> int:
        """Most tokens of an extension."""
        room = self._params.max_tokens - len(chain.tokens)
        return room if span.tokens is None else min(room, span.tokens)

    def _prefix(self, chain: Chain) -> int:
        """Most tokens before an extension that are computed again."""
        length = len(self.prompt) + len(chain.tokens)
        return min(length, self._recomputed) if self._reuses else length

    def _need(self, chain: Chain, room: int, piece: int = 0) -> int:
        """Most model tokens of an extension with its score.

        Args:
            chain: the chain.
            room: most tokens of the extension.
            piece: tokens that are sampled at once. 0: all.
        """
        length = len(self.prompt) + len(chain.tokens)
        begun = range(piece, room, piece) if piece else ()  # later pieces compute a prefix again
        again = sum(
            min(length + at, self._recomputed) if self._reuses else length + at for at in begun
        )
        return self._prefix(chain) + again + room + math.ceil(self._rate * (length + room))

    def _last_room(self, chain: Chain, left: float) -> int:
        """Most tokens of an extension that fits into what is left, with its score."""
        rate, read = self._rate, len(self.prompt) + len(chain.tokens)
        return math.floor((left - self._prefix(chain) - math.ceil(rate * read)) / (1 + rate))

    async def _extension(
        self, chain: Chain, room: int, span: Span, number: int, greedy: bool
    ) -> _Extension:
        """Sample an extension, piece by piece if the text is read to end it.

        All pieces have one noise, so they are the completion that one call would sample.
        """
        pieces: list[tuple[Chain, Sampled]] = []
        now, most = chain, len(chain.tokens) + room
        while True:
            left = most - len(now.tokens)
            one = await self._sample(
                now, min(left, PIECE) if span.read else left, span, number, greedy
            )
            pieces.append((now, one))
            now = self._extended(now, one)
            if span.read:
                ends = self._steps.ends(now.text)
                inside = (end for end in ends if len(chain.text) < end < len(now.text))
                if end := next(inside, 0):
                    return _Extension(self._up_to(now, end, len(chain.tokens) + 1), pieces)
            if not span.read or now.finish or len(now.tokens) >= most:
                return _Extension(now, pieces)

    def _up_to(self, chain: Chain, end: int, least: int) -> Chain:
        """The tokens of a chain that hold the characters to keep.

        Args:
            chain: the chain.
            end: exclusive end of the text that is kept.
            least: fewest tokens, so that every extension has some.
        """
        decode = self._renderer.decode
        count = max(least, last_tokens([end], chain.text, chain.tokens, decode)[0] + 1)
        kept = chain.tokens[:count]
        return Chain(kept, chain.logp[:count], chain.version[:count], decode(kept))

    async def _sample(
        self, chain: Chain, room: int, span: Span, number: int, greedy: bool
    ) -> Sampled:
        temperature = 0.0 if greedy else self._params.temperature
        return await self._generator.generate(
            [*self.prompt, *chain.tokens],
            replace(self._params, max_tokens=room, temperature=temperature),
            SampleKey(self._task.id, number, len(self.prompt)),
            stops=(*self._stops, *span.stops),
        )

    def _count(self, chain: Chain, sampled: Sampled, held: int) -> None:
        """Count what a piece of an extension cost.

        Args:
            chain: the chain that it extends.
            sampled: what was sampled.
            held: first tokens of the chain that were computed before those that are sampled at the
                same time. More may be found, if the engine has many to compute and begins late.
        """
        before = [*self.prompt, *chain.tokens]
        # What others have left in the cache must not make this search cheaper.
        known = self._known(before)
        self._computed.update(_beginnings([*before, *sampled.tokens[:-1]]))
        if self._cache and sampled.reused < len(before):  # else another sample has computed it all
            known = min(self._cache.findable(held), len(before) - 1)
            self.evicted |= sampled.reused < known
        reused = min(sampled.reused, known)
        self._reuses = self._reuses or reused > 0
        read, cost = len(before) - reused, self.cost
        self.cost = Cost(cost.prefilled + read, cost.sampled + len(sampled.tokens), cost.scored)

    def _extended(self, chain: Chain, sampled: Sampled) -> Chain:
        """The extended chain."""
        tokens = (*chain.tokens, *sampled.tokens)
        text: str = self._renderer.decode(tokens)
        finish: FinishReason | None = sampled.finish_reason
        # A stop string may have begun in the step before.
        ended = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ended:
            text, finish = text[: min(ended)], "stop"
        elif len(tokens) >= self._params.max_tokens:
            finish = "stop" if finish == "stop" and sampled.text is None else "length"
        elif finish == "length" or sampled.text is not None:
            finish = None  # a step has ended
        return Chain(
            tokens,
            (*chain.logp, *sampled.logp),
            (*chain.version, *sampled.version),
            text,
            finish,
        )


def _beginnings(tokens: Sequence[int]) -> Iterator[int]:
    """Hash of each beginning of the tokens, the shortest first."""
    return islice(accumulate(tokens, lambda seen, token: hash((seen, token)), initial=0), 1, None)
