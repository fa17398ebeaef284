"""Examples of a pretraining stage: windows of texts in which every token but the first is a target.

A window is a trajectory whose first token is the prompt. The log-prob of each other token is read
at the token before it, so inputs and targets are shifted by one.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from ..controller.stream import TaskStream
from ..data.texts import Document, TextSet
from ..errors import UserError
from ..recipe.schema import PretrainConfig
from ..renderer.renderer import Renderer, RenderError
from ..trainer.sft import example
from ..types import Group, Task, Trajectory

Span = tuple[int, int]
"""First token of a window, and the token after its last."""

_NAMED = 200
"""Most unknown characters that an error message lists."""


class PretrainExamples:
    """Windows of training texts, and all windows of the held-out texts.

    Token ids are kept in one array. The windows of a step depend on the seed and the step alone.

    Args:
        texts: the documents.
        config: settings of the stage.
        renderer: tokenizes the documents, and writes those of tasks.
        context: longest sequence of the model, in tokens.
        seed: seed of the windows.
        play: plays a task's episode with its worked solution, for environments of several turns.
            None: the renderer writes prompt and solution.

    Attributes:
        heldout: the held-out windows in their order. Each token of a text (with `form` =
            "documents": of a document) but its first is predicted exactly once.
        notes: messages for the user, one line each.
        unigram_entropy: `unigram_entropy` of the training tokens.
        heldout_bytes: `text_bytes` of the held-out windows.
        fingerprint: hash of the training tokens.
        steps_per_epoch: 0.

    Raises:
        UserError: the texts are shorter than a window or have characters without a token, or the
            window is longer than the context.
    """

    steps_per_epoch = 0

    def __init__(
        self,
        texts: TextSet,
        config: PretrainConfig,
        renderer: Renderer,
        *,
        context: int,
        seed: int,
        play: Callable[[Task], Trajectory] | None = None,
    ) -> None:
        if config.window > context:
            raise UserError(
                f"pretrain.window = {config.window} exceeds the model's context of {context}"
                " tokens: lower it, or set 0 for the context"
            )
        self.notes = list(texts.notes)
        self._renderer = renderer
        self._per_step = config.examples_per_step
        self._seed = seed
        self._window = window = config.window or context
        self._ids, documents = _joined(texts.train, renderer, play)
        self.unigram_entropy = unigram_entropy(self._ids)
        whole = config.form == "documents"
        self._packed = self._pack(_all_spans(documents, window)) if whole else None
        if not whole and len(self._ids) < window:
            raise UserError(
                f"the training texts have {len(self._ids)} tokens, fewer than a window of {window}"
                f" (pretrain.window = {config.window}): lower it to at most {len(self._ids)}, or"
                " add texts"
            )
        ids, documents = _joined(texts.heldout, renderer, play)
        spans = _all_spans(documents if whole else [(0, len(ids))], window)
        self.heldout: Sequence[Group] = [_group(ids, span, "held-out text") for span in spans]
        self.heldout_bytes = self.text_bytes(self.heldout)
        self.fingerprint = hashlib.sha256(self._ids.tobytes()).hexdigest()
        self.notes.append(
            f"unigram entropy of the {len(self._ids):,} training tokens:"
            f" {self.unigram_entropy:.3f} nats; a loss below it shows that the model reads its"
            " context"
        )

    def groups(self, step: int) -> list[Group]:
        """The windows of a step. Steps count from 1."""
        if self._packed is not None:
            spans = [span for window in self._packed(step) for span in window]
        else:
            draw = random.Random(f"pretrain/{self._seed}/{step}").randint
            last = len(self._ids) - self._window
            starts = [draw(0, last) for _ in range(self._per_step)]
            spans = [(start, start + self._window) for start in starts]
        return [_group(self._ids, span, "training text") for span in spans]

    def text_bytes(self, groups: Iterable[Group]) -> int:
        """Number of UTF-8 bytes of the tokens that are predicted in windows.

        Special tokens, such as the end of a text, have none.
        """
        windows = (t for group in groups for t in group.trajectories)
        counts = Counter(token for t in windows for token in t.tokens[t.prompt_length :])
        special, size = self._renderer.special_token_ids, self._renderer.token_bytes
        return sum(n * len(size(token)) for token, n in counts.items() if token not in special)

    def _pack(self, spans: Sequence[Span]) -> TaskStream[list[Span]]:
        """Endless epochs over windows that hold as many spans, in random order, as have room."""
        order, packed, room = list(spans), list[list[Span]](), 0
        random.Random(f"pretrain/{self._seed}").shuffle(order)
        for start, stop in order:
            if stop - start > room:
                packed.append([])
                room = self._window
            packed[-1].append((start, stop))
            room -= stop - start
        if len(packed) < self._per_step:
            self.notes.append(
                f"pretrain.examples_per_step = {self._per_step}, but the documents fill only"
                f" {len(packed)} windows: every step trains on all of them"
            )
        return TaskStream(packed, self._per_step, self._seed)


def unigram_entropy(ids: np.ndarray) -> float:
    """Entropy of the tokens' frequencies, in nats.

    It is the smallest loss of a model that ignores the tokens before. Lower loss means that it has
    learned from them.

    Args:
        ids: [N] token ids.
    """
    counts = np.unique(ids, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def bits_per_byte(nats: float, size: int) -> float:
    """Bits per byte of a text. It compares models whose tokenizers differ.

    Args:
        nats: negative log-prob of all tokens of the text together, in nats.
        size: UTF-8 bytes of the text.
    """
    return nats / (math.log(2) * size)


def _all_spans(ranges: Sequence[Span], window: int) -> list[Span]:
    """Windows of at most `window` tokens that cover ranges of tokens.

    Each window of a range begins with the last token of the one before, which it does not predict.
    """
    return [
        (at, min(at + window, stop))
        for start, stop in ranges
        for at in range(start, stop - 1, window - 1)
    ]


def _group(ids: np.ndarray, span: Span, name: str) -> Group:
    start, stop = span
    first, *rest = ids[start:stop].tolist()
    return example(Task(f"{name} {start}-{stop}", ""), [first], rest)


def _joined(
    documents: Sequence[Document],
    renderer: Renderer,
    play: Callable[[Task], Trajectory] | None,
) -> tuple[np.ndarray, list[Span]]:
    """Token ids [N] of all documents, each with its end token, and the range of each document.

    Raises:
        UserError: a document has characters without a token.
    """
    parts, unknown = [np.zeros(0, np.int32)], dict[str, str]()
    for one in documents:
        try:
            parts.append(np.array(_written(one, renderer, play), np.int32))
        except RenderError:
            unknown |= {c: one.id for c in renderer.unknown(one.text) if c not in unknown}
    if unknown:
        shown = "".join(sorted(unknown)[:_NAMED])
        raise UserError(
            f"document {next(iter(unknown.values()))}: the tokenizer does not know"
            f" {len(unknown)} characters of the texts: {shown!r}. Add them to"
            " model.scratch.alphabet, set model.scratch.tokenizer = 'trained', or use another model"
        )
    bounds = accumulate(map(len, parts))
    return np.concatenate(parts), list(pairwise(bounds))


def _written(
    document: Document,
    renderer: Renderer,
    play: Callable[[Task], Trajectory] | None,
) -> list[int]:
    """Token ids of a document with its end token.

    Raises:
        RenderError: it has characters without a token.
    """
    task, end = document.task, renderer.tokenizer.eos_token_id
    if end is None:
        raise UserError(
            "the model's tokenizer has no end token (eos_token), which separates documents: add one"
            " to its tokenizer_config.json"
        )
    if task is None:
        return [*renderer.encode_text(document.text), end]
    ids = play(task).tokens if play else renderer.encode(task) + renderer.solution(task)
    if renderer.tokenizer.unk_token_id in ids and renderer.unknown(document.text):
        raise RenderError("the solution has characters without a token", "messages")
    return ids
