"""JSON modes and forced tool calls: from a request to a grammar to a constraint for the engine.

llguidance (the extra `structured`) compiles and matches the grammars.
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

from sixfold.renderer.call_formats import HERMES
from sixfold.renderer.renderer import Renderer

from .api_error import bad_request

log = logging.getLogger("sixfold_serving")

WHITESPACE = r"[ \n]{0,20}"
"""White space between the parts of JSON.

It is bounded: otherwise a model may write white space up to its token limit.
"""
JSON_MARKS = '{}[]":,'
MAX_GRAMMAR = 1 << 18
"""Maximum number of characters of a grammar."""


@dataclass(frozen=True)
class Form:
    """Required form of a completion.

    Attributes:
        schema: JSON schema of the text, or None for any text.
        tools: (name, JSON schema of the arguments) of each tool that may be called.
        calls: True if the completion must consist of calls. Otherwise it may be calls or text.
        many: True if several calls are allowed.
    """

    schema: dict[str, Any] | None = None
    tools: tuple[tuple[str, dict[str, Any]], ...] = ()
    calls: bool = False
    many: bool = True

    @property
    def is_free(self) -> bool:
        """True if every completion is allowed."""
        return self.schema is None and not self.calls


def lark_grammar(form: Form) -> str:
    """The form as a grammar in llguidance's variant of Lark.

    Calls have the format of Hermes and Qwen models.
    """
    lines, starts = [], []
    if form.tools:
        starts.append("calls")
        lines.append("calls: call" + (r' ("\n" call)*' if form.many else ""))
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(form.tools))))
        for i, (name, schema) in enumerate(form.tools):
            before = json.dumps(
                f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
                ensure_ascii=False,
            )
            lines.append(
                f'call_{i}: {json.dumps(HERMES.mark)} /\\n?/ {before} arguments_{i} "}}" /\\n?/'
                f" {json.dumps(HERMES.close)}"
            )
            lines.append(f"arguments_{i}: %json {_schema({'type': 'object'} | schema)}")
    if form.schema is not None and not form.calls:
        starts.append("text")
        lines.append(f"text: %json {_schema(form.schema)}")
    return "\n".join([f"start: {' | '.join(starts)}", *lines])


def _schema(schema: dict[str, Any]) -> str:
    return json.dumps(
        {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}} | schema
    )


class Grammars:
    """Compiles forms for one model.

    Args:
        renderer: has the model's tokenizer. Used only by the thread that compiles.
        vocabulary: width of the model's logits (V).
        stop_token_ids: ids of the tokens that end a completion.
    """

    def __init__(
        self, renderer: Renderer, vocabulary: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._renderer = renderer
        self._vocabulary = vocabulary
        self._stops = stop_token_ids
        self._made: Any = None
        self._unwritable = ""
        self._lock = Lock()

    def compile(self, form: Form) -> GrammarConstraint:
        """Compile a form to a constraint.

        Raises:
            ApiError: llguidance is not installed, the model has no end token or cannot write JSON,
                or the form cannot be compiled.
        """
        param = "tool_choice" if form.calls else "response_format"
        if find_spec("llguidance") is None:
            raise bad_request(
                f"{param} needs llguidance on the server. Run pip install 'sixfold[structured]'",
                param,
                "unsupported_value",
            )
        if not self._stops:
            raise bad_request(
                f"{param} needs a model with an end token, which this model lacks",
                param,
                "unsupported_value",
            )
        from llguidance import LLMatcher

        grammar = lark_grammar(form)
        if len(grammar) > MAX_GRAMMAR:
            raise bad_request(
                f"{param}: the schema is too large. Simplify it", param, "invalid_value"
            )
        tokenizer = self._ll_tokenizer()
        if self._unwritable:  # llguidance would use the unknown token for these characters
            raise bad_request(
                f"{param}: the model cannot write JSON, because its tokenizer has no token for"
                f" {self._unwritable}",
                param,
                "unsupported_value",
            )
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise bad_request(
                f"{param}: the schema cannot be compiled: {_reason(matcher.get_error())}",
                param,
                "invalid_value",
            )
        return GrammarConstraint(matcher, self._vocabulary, self._stops)

    def _ll_tokenizer(self) -> Any:
        """llguidance's tokenizer.

        It is made at the first request, because it reads the vocabulary.
        """
        with self._lock:
            if self._made is None:
                from llguidance import LLTokenizer

                # Any: llguidance's stubs require a class, but it accepts any object with this
                # interface.
                vocabulary: Any = _Vocabulary(self._renderer, self._vocabulary, self._stops)
                self._unwritable = vocabulary.unwritable(JSON_MARKS)
                self._made = LLTokenizer(vocabulary, eos_token=list(self._stops))
            return self._made


class _Vocabulary:
    """Tokenizer interface for llguidance: the bytes of every token, and the tokens of a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, renderer: Renderer, size: int, stops: tuple[int, ...]) -> None:
        self._renderer = renderer
        special = renderer.special_token_ids | set(stops)
        token_bytes = renderer.token_bytes
        self.tokens = [
            b"\xff" + token_bytes(i) if i in special else token_bytes(i) for i in range(size)
        ]
        self.special_token_ids = sorted(special)
        self.eos_token_id = stops[0]

    def unwritable(self, characters: str) -> str:
        """The given characters that no ordinary token contains, separated by spaces."""
        special = set(self.special_token_ids)
        known = set().union(*(token for i, token in enumerate(self.tokens) if i not in special))
        return " ".join(character for character in characters if ord(character) not in known)

    def __call__(self, text: str) -> list[int]:
        return self._renderer.plain(text)


class GrammarConstraint:
    """A compiled grammar, as an `engine.sequence.Constraint`.

    Args:
        matcher: llguidance's matcher at the start of the grammar. It is copied for each completion.
        vocabulary: width of the model's logits (V).
        stops: ids of the tokens that end a completion.
    """

    def __init__(self, matcher: Any, vocabulary: int, stops: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stops = list(stops)

    def start(self) -> GrammarMatcher:
        """A new matcher for one completion."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary, self._stops)


class GrammarMatcher:
    """Matches one completion against the grammar. Rejected speculative tokens are rolled back.

    Args:
        matcher: llguidance's matcher. No other completion may use it.
        vocabulary: width of the model's logits (V).
        stops: ids of the tokens that end a completion.
    """

    def __init__(self, matcher: Any, vocabulary: int, stops: list[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stops = stops
        self._seen: list[int] = []
        self._failed = False

    def allowed(self, completion: Sequence[int]) -> Tensor:
        """Mask of the tokens that may follow the completion, [V] bool.

        All tokens are allowed after a completion that violates the grammar. That only happens for
        speculative tokens, and nothing is sampled there. If llguidance has failed, or no token may
        follow, only stop tokens are allowed.
        """
        follows = self._follow(list(completion))
        if follows:
            mask = (
                torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[
                    : self._vocabulary
                ]
                != 0
            )
            if not self._matcher.is_error() and bool(mask.any()):
                return mask
            self._fail()
        mask = torch.full((self._vocabulary,), not follows)
        mask[self._stops] = True
        return mask

    def _follow(self, completion: list[int]) -> bool:
        """Move the matcher to the end of the completion. Returns False if it violates the grammar.

        After a failure of llguidance it returns True.
        """
        same = len(self._seen)
        if completion[:same] != self._seen:
            same = next(
                i
                for i, (a, b) in enumerate(zip([*self._seen, -1], [*completion, -2], strict=False))
                if a != b
            )
            self._matcher.rollback(len(self._seen) - same)
            del self._seen[same:]
        rest = completion[same:]
        taken = self._matcher.validate_tokens(rest) if rest else 0
        if taken and not self._matcher.consume_tokens(rest[:taken]):
            self._fail()
        self._seen += rest[:taken]
        return bool(taken == len(rest)) or self._failed

    def _fail(self) -> None:
        """Record that llguidance failed, for example at a limit. The completion must then end."""
        if self._matcher.is_error() and not self._failed:
            log.warning("constrained decoding ended early: %s", _reason(self._matcher.get_error()))
            self._failed = True


def _reason(error: str) -> str:
    """First line of an error message of llguidance, at most 300 characters."""
    return (error.strip().splitlines() or ["unknown error"])[0][:300]
