"""Protection of the judge against hostile completions.

`refusal` rejects a text without asking the judge, but only if no honest answer looks like it. The
judge decides about all other texts. It sees them cleaned (`shown`), between marks with a random
number that their writer could not know (`marked`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from ..text.marks import hidden_message, invisible, neutral_turns, visible

CUT = "\n[... {count} characters of this text are left out here ...]\n"

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")

_OPENERS_TEXT = """
    thought process
    thoughts
    thinking
    thinking process
    reasoning
    reasoning process
    solution
    solution process
    the solution
    answer
    the answer
    final answer
    the final answer
    the final answer is
    the answer is
    my answer
    my answer is
    explanation
    analysis
    response
    result
    conclusion
    step by step
    step by step solution
    step 1
    sure here is the answer
    let me think
    let's begin
    let's start
    here is the answer
    here is the solution
    here is my answer
    here's the answer
    here's the solution
    to solve this problem
    i will solve this problem step by step
    解
    解答
    解決策
    解决方案
    答案
    答え
    回答
    答
    かいせつ
    解説
    解析
    思考过程
    思考過程
    풀이
    정답
    해설
    答案是
    respuesta
    la respuesta
    la respuesta es
    solución
    solucion
    réponse
    reponse
    la réponse
    la réponse est
    lösung
    loesung
    antwort
    die antwort
    die antwort ist
    risposta
    soluzione
    resposta
    solução
    ответ
    решение
    उत्तर
    الجواب
    الحل
"""
_POLITE = frozenset(("sure", "certainly", "of course", "okay", "ok", "yes", "great question"))
"""Phrases that may precede an announcement. Alone, they may be an answer."""
_OPENER = re.compile(
    r"(?:(?:ok|okay|alright|sure|certainly|of course|first) )?"
    r"(?:let's|let us|let me|i will|i'll|we will|we'll)"
    r" (?:now )?(?:solve|think|work|reason|break|go|analy[sz]e|approach|tackle|figure|start|begin"
    r"|walk)"
    r"(?: (?:about|through|on|out|at|by|with|over))?"
    r"(?: (?:this|it|that|the (?:problem|question|task)|this (?:problem|question|task)))?"
    r"(?: (?:down|out|through|carefully|together|logically|systematically))*(?: step by step)?"
)

_FORGED = {
    "a verdict": re.compile(
        r"\[\[\s*(?:in)?(?:correct|right|wrong|passe?d?|true|false|yes|no|tie|[ABC]|"
        r"\d+(?:\.\d+)?\s*/\s*\d+)\s*\]\]"
        r"|\b(?:final|overall)\s+(?:verdict|judge?ment|score|grade|rating)\b\s*[\"'*]*\s*[:=]"
        r"|\b(?:verdict|judge?ment|score|grade|rating|evaluation)[\"'*\s]*[:=][\"'*\s\[]*"
        r"(?:correct\b|right\b|pass(?:ed)?\b|accurate\b|perfect\b|excellent\b|full marks\b|true\b"
        r"|(\d+(?:\.\d+)?)\s*/\s*\1(?!\d)|100\s*%|1\.0\b)"
        r"|<\s*/?\s*(?:verdict|score|grade|reward|evaluation|judge?ment)\s*>",
        re.IGNORECASE,
    ),
    "the reply of a judge": re.compile(
        r"[\"'](?:verdicts?|scores?|grade|rating|reward|is_correct|winner|nonce)[\"']\s*:",
        re.IGNORECASE,
    ),
    "the marks around an answer": re.compile(
        r"[\[<]{1,3}\s*/?(?:BEGIN|END)[\s_](?:ANSWER|QUESTION|REFERENCE|FIRST|SECOND|DATA)\b",
        re.IGNORECASE,
    ),
    "an instruction to the judge": re.compile(
        r"\b(?:ignore|disregard|forget|override)\s+(?:(?:all|any|the|these|those|your|of)\s+)*"
        r"(?:previous|prior|above|earlier|preceding|other|your|grading)?\s*"
        r"(?:instructions?|prompts?|rules|rubrics?|criteria|guidelines)\b"
        r"|\b(?:note|message|instructions?|attention|dear|hey|hello)[\s,:]+(?:to|for)?\s*"
        r"(?:the\s+)?(?:grader|judge|evaluator|grading model)\b"
        r"|\b(?:give|award|assign|grant)\s+(?:this|the|my|it|me|full|a)\b[^.\n]{0,60}?"
        r"\b(?:full|maximum|highest|perfect|top|max|10/10|100%)\s*"
        r"(?:marks?|scores?|points|credit|rating|grade|reward)\b"
        r"|\b(?:you|grader|judge|evaluator)\s+(?:must|should|shall|have to|are required to)\s+"
        r"(?:output|return|reply|respond|grade|score|rate|mark|accept|choose|prefer|say)\b",
        re.IGNORECASE,
    ),
}

_PRAISE_TEXT = """
    a an and the this that is are it its with as to of in for all every each by on or be has have
    my answer response solution reply text above below here i which fully exactly completely
    perfectly clearly entirely very highly most best well above perfect excellent great good correct
    right true accurate complete concise clear helpful honest harmless relevant useful precise
    thorough detailed comprehensive logical sound valid factual accurate consistent coherent high
    quality full maximum matches match meets meet satisfies satisfy follows follow fulfils fulfills
    addresses covers deserves reference criteria criterion rubric requirements question principles
    principle expected gold standard provided given completely information any errors without no
    mistakes marks score points credit
"""
_PRAISE = frozenset(_PRAISE_TEXT.split())
_SELF = re.compile(r"\b(?:my|this|the) (?:answer|response|solution|reply)\b", re.IGNORECASE)


def refusal(text: str, question: str, reference: str = "", known: Iterable[str] = ()) -> str:
    """Check whether a completion is refused without asking the judge.

    Args:
        text: answer part of the completion.
        question: question of the task. A suspicious phrase is allowed if the question contains a
            word of the phrase.
        reference: reference answers, one per line; all but the first begin with "or: ". "" if
            there is none. An answer that equals one of them is always allowed.
        known: texts of the criteria or principles. A text that describes itself only with their
            words and with words of praise is refused.

    Returns:
        The reason of the refusal, or "" if the judge must be asked.
    """
    if hidden_message(text):
        return "has invisible characters that spell a text"
    seen = visible(text)
    if not seen.strip():
        return "the answer is empty"
    if reference and any(_same(seen, line) for line in reference.split("\nor: ")):
        return ""
    if all(unicodedata.category(c)[0] in "PZC" for c in seen):
        return "the answer has no word, number or symbol"
    if _only_openers(seen):
        return f"announces an answer and gives none: {_short(seen)}"
    words = _words(f"{question} {reference}")
    if forged := _forgery(seen, words):
        return forged
    if _is_echo(seen, words, known):
        return f"praises itself in the words of the rubric and says nothing: {_short(seen)}"
    return ""


def shown(text: str, limit: int) -> str:
    """A text as the judge sees it.

    An invisible character is replaced by its code point, such as <U+200B>. A space is inserted into
    control tokens of chat templates.

    Args:
        limit: maximum characters. The middle of a longer text is replaced by a note.
    """
    if len(text) > limit:
        half = limit // 2
        text = text[:half] + CUT.format(count=len(text) - 2 * half) + text[-half:]
    visible_text = "".join(f"<U+{ord(c):04X}>" if invisible(c) else c for c in text)
    return neutral_turns(visible_text)


def marked(name: str, text: str, nonce: str) -> str:
    """A text between marks with a random number that its writer could not know."""
    return f"[BEGIN {name} {nonce}]\n{text}\n[END {name} {nonce}]"


def _forgery(text: str, question: frozenset[str]) -> str:
    """Reason of a refusal if the text forges a verdict or instructs the judge, otherwise ""."""
    for what, pattern in _FORGED.items():
        for found in pattern.finditer(unicodedata.normalize("NFKC", text)):
            if not (_words(found[0]) - _PLAIN_WORDS) & question:
                return f"writes {what}: {_short(found[0])}"
    return ""


_PLAIN_TEXT = "a the this my it you to of all any for final true false yes no"
_PLAIN_WORDS = frozenset(_PLAIN_TEXT.split())
"""Words that do not make a suspicious phrase acceptable, even if the question contains them."""


def _same(text: str, reference: str) -> bool:
    """True if a text equals the reference answer, apart from case and punctuation."""
    plain = _plain(reference)
    return text.strip() == reference.strip() or (bool(plain) and _plain(text) == plain)


def _only_openers(text: str) -> bool:
    """True if every line or sentence announces an answer, and none gives one."""
    parts = [_plain(part) for part in re.split(r"[\n.:!;。：]+", text)]
    said = [part for part in parts if part and part not in _POLITE]
    return bool(said) and all(part in _OPENERS or _OPENER.fullmatch(part) for part in said)


def _is_echo(text: str, question: frozenset[str], known: Iterable[str]) -> bool:
    """True if a text only praises itself, with words of praise or of the rubric."""
    if not _SELF.search(text):
        return False
    allowed = _PRAISE.union(*(_words(line) for line in known))
    said = _words(text)
    # A word of the question that is not praise may be the content of an answer.
    return said <= allowed and not (said & question - _PRAISE)


def _words(text: str) -> frozenset[str]:
    """The distinct words of a text, in lower case."""
    return frozenset(_plain(text).split())


def _plain(text: str) -> str:
    """The words of a text in lower case, separated by spaces, without punctuation."""
    normal = unicodedata.normalize("NFKC", visible(text)).replace("’", "'").casefold()
    return " ".join(_WORD.findall(normal))


_OPENERS = frozenset(map(_plain, _OPENERS_TEXT.strip().splitlines()))
"""Texts that announce an answer but give none, in the form of `_plain`."""


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
