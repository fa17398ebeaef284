"""JSON modes and forced tool calls: from a request to a grammar, and from a grammar to a constraint of the engine.

Grammars are compiled and matched by llguidance (the extra `structured`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..rollout.token_bytes import TokenBytes
from .api_error import bad_request
from .tool_calls import CLOSE, OPEN

log = logging.getLogger("sixfold.server")

WHITESPACE = r"[ \n]{0,20}"
"""Between the parts of JSON.

Bounded: a model that has nothing to say would write white space up to its limit.
"""
JSON_MARKS = '{}[]":,'
MAX_GRAMMAR = 1 << 18
"""Characters of a grammar."""


@dataclass(frozen=True)
class Form:
    """What a completion must look like.

    Attributes:
        schema: JSON schema of the text, or None if it may be any text.
        tools: name and JSON schema of the arguments, of each tool that may be called.
        calls: whether the completion must be calls. Otherwise it may be calls or the text.
        many: whether there may be several calls.
    """

    schema: dict[str, Any] | None = None
    tools: tuple[tuple[str, dict[str, Any]], ...] = ()
    calls: bool = False
    many: bool = True

    @property
    def is_free(self) -> bool:
        """True if any completion will do."""
        return self.schema is None and not self.calls


def lark_grammar(form: Form) -> str:
    """The form in llguidance's variant of Lark. A call is written as Hermes and Qwen models do."""
    lines, starts = [], []
    if form.tools:
        starts.append("calls")
        lines.append("calls: call" + (r' ("\n" call)*' if form.many else ""))
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(form.tools))))
        for i, (name, schema) in enumerate(form.tools):
            before = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', ensure_ascii=False)
            lines.append(f'call_{i}: {json.dumps(OPEN)} /\\n?/ {before} arguments_{i} "}}" /\\n?/ {json.dumps(CLOSE)}')
            lines.append(f"arguments_{i}: %json {_schema({'type': 'object'} | schema)}")
    if form.schema is not None and not form.calls:
        starts.append("text")
        lines.append(f"text: %json {_schema(form.schema)}")
    return "\n".join([f"start: {' | '.join(starts)}", *lines])


def _schema(schema: dict[str, Any]) -> str:
    return json.dumps({"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}} | schema)


class Grammars:
    """Compiles forms for one tokenizer.

    Args:
        tokenizer: used by the thread that compiles.
        vocabulary: width of the model's logits.
        stop_token_ids: tokens that end a completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stops = stop_token_ids
        self._made: Any = None
        self._unwritable = ""
        self._lock = Lock()

    def compile(self, form: Form) -> GrammarConstraint:
        """A constraint of this form.

        Raises:
            ApiError: llguidance is not installed, or the form cannot be compiled.
        """
        param = "tool_choice" if form.calls else "response_format"
        if find_spec("llguidance") is None:
            raise bad_request(f"{param} needs llguidance on the server: pip install 'sixfold[structured]'", param, "unsupported_value")
        if not self._stops:
            raise bad_request(f"{param} needs a model with an end token", param, "unsupported_value")
        from llguidance import LLMatcher

        grammar = lark_grammar(form)
        if len(grammar) > MAX_GRAMMAR:
            raise bad_request(f"{param}: its schema is too large", param, "invalid_value")
        tokenizer = self._ll_tokenizer()
        if self._unwritable:  # llguidance would take the token for unknown characters instead
            raise bad_request(f"{param}: the model cannot write JSON, its tokenizer has no token with {self._unwritable}", param, "unsupported_value")
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise bad_request(f"{param}: the schema cannot be followed: {_reason(matcher.get_error())}", param, "invalid_value")
        return GrammarConstraint(matcher, self._vocabulary, self._stops)

    def _ll_tokenizer(self) -> Any:
        """Made at the first request: it reads the whole vocabulary."""
        with self._lock:
            if self._made is None:
                from llguidance import LLTokenizer

                vocabulary: Any = _Vocabulary(self._tokenizer, self._vocabulary, self._stops)  # its stubs name a class, it takes any such object
                self._unwritable = vocabulary.unwritable(JSON_MARKS)
                self._made = LLTokenizer(vocabulary, eos_token=list(self._stops))
            return self._made


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every token, and the tokens of a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, stops: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(stops)
        token_bytes = TokenBytes(tokenizer)
        self.tokens = [b"\xff" + token_bytes(i) if i in special else token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(special)
        self.eos_token_id = stops[0]

    def unwritable(self, characters: str) -> str:
        """Those of the characters that are in no token but special ones."""
        special = set(self.special_token_ids)
        known = set().union(*(token for i, token in enumerate(self.tokens) if i not in special))
        return " ".join(character for character in characters if ord(character) not in known)

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


class GrammarConstraint:
    """A compiled grammar (`engine.sequence.Constraint`)."""

    def __init__(self, matcher: Any, vocabulary: int, stops: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stops = list(stops)

    def start(self) -> GrammarMatcher:
        """A matcher for one completion."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary, self._stops)


class GrammarMatcher:
    """Follows one completion. It goes back where a speculated token was not taken."""

    def __init__(self, matcher: Any, vocabulary: int, stops: list[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stops = stops
        self._seen: list[int] = []
        self._failed = False

    def allowed(self, completion: Sequence[int]) -> Tensor:
        """Which tokens may follow, [V] bool.

        All, behind a completion that the grammar does not allow: nothing is drawn there.
        """
        follows = self._follow(list(completion))
        if follows:
            mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[: self._vocabulary] != 0
            if not self._matcher.is_error() and bool(mask.any()):
                return mask
            self._fail()
        mask = torch.full((self._vocabulary,), not follows)
        mask[self._stops] = True
        return mask

    def _follow(self, completion: list[int]) -> bool:
        """Bring the matcher behind the completion. False if the grammar does not allow it."""
        same = len(self._seen)
        if completion[:same] != self._seen:
            same = next(i for i, (a, b) in enumerate(zip([*self._seen, -1], [*completion, -2], strict=False)) if a != b)
            self._matcher.rollback(len(self._seen) - same)
            del self._seen[same:]
        rest = completion[same:]
        taken = self._matcher.validate_tokens(rest) if rest else 0
        if taken and not self._matcher.consume_tokens(rest[:taken]):
            self._fail()
        self._seen += rest[:taken]
        return bool(taken == len(rest)) or self._failed

    def _fail(self) -> None:
        """A limit of llguidance was reached: the completion ends here."""
        if self._matcher.is_error() and not self._failed:
            log.warning("constrained decoding ended early: %s", _reason(self._matcher.get_error()))
            self._failed = True


def _reason(error: str) -> str:
    """The first line of a message of llguidance."""
    return (error.strip().splitlines() or ["unknown error"])[0][:300]
