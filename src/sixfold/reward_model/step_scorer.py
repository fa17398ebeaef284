"""Scores of the steps of completions by a process reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..batch import collate
from ..errors import UserError
from ..step_scorer import StepScorer
from ..steps import Steps, last_tokens, named_steps, steps_of, tokenized_ends
from ..trainer.logprobs import Scoring, score_tables
from ..types import Group, Task
from .step_model import CONVENTIONS, StepModel
from .step_rows import step_row


class _Read(NamedTuple):
    """Token ids of a prompt with a completion, and the index at which each step is read."""

    tokens: list[int]
    at: list[int]


class ProcessScorer(StepScorer):
    """Scores steps by a process reward model.

    Completions of one prompt share the computation of all tokens before the first that differs.

    Args:
        step_model: the model.
        max_tokens: most tokens that are computed at once.
        ends: where steps end. Empty: as the model has it.

    Attributes:
        tokens: tokens that the model has computed.
        renderer: with the model's tokenizer.
        ends: where steps end, by name.
        steps: the same as a function of a text.

    Raises:
        UserError: for an unknown way to end steps.
    """

    def __init__(self, step_model: StepModel, max_tokens: int, ends: str = "") -> None:
        self.tokens = 0
        self.renderer = step_model.renderer
        self.ends = ends or named_steps(step_model.ends, "environment.prm.ends")
        self.steps: Steps = steps_of(
            self.ends,
            partial(tokenized_ends, encode=self.renderer.plain, decode=self._decode),
        )
        self._step_model = step_model
        self._convention = CONVENTIONS[step_model.name]
        self._max_tokens = max_tokens
        root: Any = step_model.root
        root.register_forward_pre_hook(self._count)

    @property
    def vocabulary(self) -> int:
        """Number of embeddings: larger token ids cannot be scored."""
        embeddings: Any = self._step_model.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def reads_tokens(self) -> bool:
        """True if the model reads completions as they were sampled, without marks."""
        return not self._convention.mark

    def score(
        self,
        task: Task,
        completions: Sequence[str],
        ends: Sequence[Sequence[int]],
        every: bool = True,
    ) -> list[list[float]]:
        """As `StepScorer.score`.

        Args:
            task: as there, as are `completions` and `ends`.
            every: raise if a completion does not fit the context. Otherwise its scores are NaN,
                unless none fits.

        Raises:
            UserError: also if a step is in none of the model's tokens.
        """
        if self.reads_tokens:
            ids = [self.renderer.plain(text) for text in completions]
            return self.score_tokens(self.renderer.encode(task), ids, completions, ends, every)
        try:
            rows = [self._marked(task, *one) for one in zip(completions, ends, strict=True)]
        except ValueError as error:
            raise UserError(f"process reward model: {error}") from error
        return self._scores(rows, every=every)

    def score_tokens(
        self,
        prompt: Sequence[int],
        completions: Sequence[Sequence[int]],
        texts: Sequence[str],
        ends: Sequence[Sequence[int]],
        every: bool = True,
    ) -> list[list[float]]:
        """As `score`, of completions given by their tokens. The model must read tokens.

        Args:
            prompt: token ids of the prompt.
            completions: token ids of each completion.
            texts: the completions.
            ends: character ends of the steps of each text.
            every: as for `score`.
        """
        rows = []
        for ids, text, of_text in zip(completions, texts, ends, strict=True):
            try:
                at = last_tokens(of_text, text, ids, self._decode)
            except ValueError as error:
                raise UserError(f"process reward model: {error}") from error
            rows.append(_Read([*prompt, *ids], [len(prompt) + index for index in at]))
        return self._scores(rows, len(prompt), every)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.renderer.shown(ids, special=False)

    def _marked(self, task: Task, text: str, ends: Sequence[int]) -> _Read:
        """A completion of a task with a mark after each step."""
        own, mark = self._convention, self._step_model.mark
        steps = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        if own.prompt and steps:  # the prompt's text has no start of the reply
            steps[0] = task.prefill + steps[0]
        steps = [step.strip() for step in steps]
        if word := own.mark.strip():  # a policy that writes marks would choose where it is scored
            steps = [_without(step, word) for step in steps]
        prompt = own.prompt.format(task.prompt_text)
        if not own.apart:
            tokens = self.renderer.encode_text(
                prompt + own.after.join(step + own.mark for step in steps)
            )
            found = [place for place, token in enumerate(tokens) if token == mark[-1]]
            return _Read(tokens, found[len(found) - len(steps) :])  # a prompt may have marks too
        if own.prompt:
            tokens = self.renderer.encode_text(prompt)
            if (first := self.renderer.tokenizer.bos_token_id) is not None and tokens[0] != first:
                tokens = [first, *tokens]
        else:
            tokens = list(self.renderer.encode(task))
        at = []
        for step in steps:
            tokens += [*self.renderer.plain(step), *mark]
            at.append(len(tokens) - 1)
        return _Read(tokens, at)

    def _scores(
        self, rows: Sequence[_Read], prompt: int = 0, every: bool = True
    ) -> list[list[float]]:
        """Score of each step of rows that begin alike.

        Args:
            rows: the rows.
            prompt: number of tokens before the completions, if the model scores tokens.
            every: as for `score`.
        """
        room = self._step_model.context - 1
        with_steps = [row for row in rows if row.at]  # an empty completion has none
        read = [row for row in with_steps if len(row.tokens) <= room]
        if not with_steps:
            return [[] for _ in rows]
        longest = max(len(row.tokens) for row in with_steps)
        if longest > room and (every or not read):
            raise UserError(
                f"the process reward model reads at most {room} tokens, and a prompt with its"
                f" completion has {longest}"
            )
        by_token = self._step_model.models == 2
        shared = prompt if by_token else _shared(read)
        made = []
        for number, row in enumerate(read):
            rest = row.tokens[shared:]
            at = range(-1, len(rest) - 1) if by_token else (at - shared for at in row.at)
            labels = dict.fromkeys(at, 0.0)
            made.append(step_row("scored", number, row.tokens[:shared], rest, labels))
        batch = collate([Group(Task("scored", ""), made)]).to(self._step_model.model.device)
        root = self._step_model.root
        values, _ = score_tables(root, batch, Scoring(), self._max_tokens, share_prefix=True)
        logits = values.double()
        if by_token:  # the sum up to a token stands at the next one, where a head would be read
            logits = logits.cumsum(-1).roll(1, -1)
        table = iter(logits.sigmoid().cpu())
        return [
            [math.nan] * len(row.at)
            if not row.at or len(row.tokens) > room
            else next(table)[[at + 1 for at in row.at]].tolist()
            for row in rows
        ]

    def _count(self, root: nn.Module, given: tuple[Any, ...]) -> None:
        """Count the tokens of a packed row before it is computed."""
        tokens: torch.Tensor = given[0].tokens
        self.tokens += len(tokens) * self._step_model.models


def _shared(rows: Sequence[_Read]) -> int:
    """Number of tokens before the first step of a row, up to the first in which rows differ."""
    first, *others = rows
    shared = min(row.at[0] for row in rows)
    for row in others:
        shared = next((n for n in range(shared) if row.tokens[n] != first.tokens[n]), shared)
    return shared


def _without(text: str, word: str) -> str:
    """The text without a word, also where removing it would make another."""
    while word in text:
        text = text.replace(word, "")
    return text.strip()
