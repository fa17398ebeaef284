"""Rows in other languages than those that are wanted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from sixfold.errors import nearest

from .stage import Context, Decision, Health, Rows, Stage

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

_NOT_PROSE = re.compile(
    r"```.*?```|\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)|\$[^$\n]*\$|\\begin\{(\w+\*?)\}.*?\\end\{\1\}"
    r"|https?://\S+|\\[A-Za-z]+|[\x21-\x7e]*[\d_=+*/^<>{}\[\]|\\][\x21-\x7e]*"
    r"|\b[A-Za-z]+(?:[.(][A-Za-z(]|\(\))[\x21-\x7e]*|^[ \t]*(?:def|class|import|from|return|for|if"
    r"|elif|else|while|with|try|except|raise|async|await|public|private|static|const|let|var|function)\b"
    r"[^\n]*[:;{)\]]$",
    re.DOTALL | re.MULTILINE,
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
"""Letters of writing without spaces. Each counts as a word."""
_SENTENCE = re.compile(r"(?<=[.!?:])\s+|(?<=[。！？])|\n+")

FOREIGN_SHARE = 0.15
"""Share of words in sentences of other languages from which on a prompt is in another language: an
English instruction around a problem in Chinese does not make it English."""
LEAST_CERTAIN = 0.5
"""Probability that the three most probable languages have together, if they are others: of a text
that is in no language, such as code, no language is probable.
"""
LEAST_FOREIGN = 8
"""Words in such sentences that a prompt must have."""


class Language(Stage):
    """Keep rows whose prompt and replies are in one of some languages.

    Args:
        keep: languages (ISO 639-1).
        least_words: words of prose that a text must have to be judged. Formulas, code and addresses
            are no prose. Prompts with fewer words are kept and counted.
        confidence: probability of other languages from which on a text is in one of them.
        replies: whether the answer, or both completions of a comparison, count too.
    """

    kind: ClassVar[str] = "language"

    keep: tuple[str, ...] = Field(default=("en",), min_length=1)
    least_words: int = Field(default=5, ge=1)
    confidence: float = Field(default=0.9, gt=0.5, lt=1.0)
    replies: bool = True

    @field_validator("keep")
    @classmethod
    def _known(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        labels = sorted(_identifier().labels)
        for language in keep:
            if language not in labels:
                raise ValueError(
                    f"{language!r} is no language that can be recognised; write two small letters"
                    f" (ISO 639-1), such as en or zh.{nearest(language, labels)}"
                )
        return keep

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        languages: Counter[str] = Counter()
        dropped = 0
        for record in rows:
            language, note = self.language(record.prompt)
            if not note and self.replies:
                reply, said = self.language(record.answer)
                language, note = (reply, f"the reply: {said}") if said else (language, note)
            languages[language or "(too short to judge)"] += 1
            other = bool(note)
            dropped += other
            yield Decision(record, not other, "other_language" if other else "", note)
        total = len(rows)
        return Health(
            metric="share in other languages",
            value=dropped / total if total else float("nan"),
            figures={"languages": dict(languages.most_common(20))},
        )

    def language(self, text: str) -> tuple[str, str]:
        """Language of a text, or "" if it is too short to judge, and a note if the language is not
        one of those to keep.
        """
        words, language, probability = self._judged(text, self.least_words)
        if not words:
            return "", ""
        if language not in self.keep:
            return language, f"{language} (probability {probability:.2f})"
        others: Counter[str] = Counter()
        parts = [self._judged(part, self.least_words) for part in _SENTENCE.split(text)]
        for count, other, _ in parts:
            if other not in self.keep:
                others[other] += count
        if others.total() < max(LEAST_FOREIGN, FOREIGN_SHARE * words):
            return language, ""
        most = others.most_common(1)[0][0]
        return most, f"{most} in sentences with {others.total()} of {words} words"

    def _judged(self, text: str, least: int) -> tuple[int, str, float]:
        """Words of prose, language, and its probability. A language that is kept has the benefit of
        the doubt.
        """
        prose = _NOT_PROSE.sub(" ", text)
        words = _weight(prose)
        if words < least:
            return 0, self.keep[0], 0.0
        ranked = _identifier().rank(prose.lower())
        kept = sum(probability for language, probability in ranked if language in self.keep)
        certain = sum(probability for _, probability in ranked[:3]) >= LEAST_CERTAIN
        if certain and 1 - kept >= self.confidence and ranked[0][0] not in self.keep:
            return words, *ranked[0]
        return words, next(label for label, _ in ranked if label in self.keep), kept


def _weight(prose: str) -> int:
    """Words, where those of other scripts than Latin, which few languages share, count double."""
    spaced = (
        _WORD.findall(_UNSPACED.sub(" ", prose)) if not prose.isascii() else _WORD.findall(prose)
    )
    return len(spaced) + sum(word[0] > "\u024f" for word in spaced) + len(_UNSPACED.findall(prose))


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
