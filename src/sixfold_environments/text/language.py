"""Reward for an answer in the requested language, judged by script and frequent words.

The script decides: Latin, Cyrillic, Han and so on. Languages of the Latin script are told apart by
their most frequent words. That needs some text: a number or a name has no language, and passes.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from sixfold.environment.grade import Grade
from sixfold.types import Task

from .marks import forged_turn, visible

MAX_FOREIGN = 0.05
"""Largest share of letters in other scripts, such as names and quotations."""

MIN_WORDS = 2
"""Minimum number of frequent words by which another language is recognised."""

_SCRIPTS = {
    "en": ("LATIN",), "es": ("LATIN",), "fr": ("LATIN",), "de": ("LATIN",), "it": ("LATIN",),
    "pt": ("LATIN",), "nl": ("LATIN",), "pl": ("LATIN",), "tr": ("LATIN",), "sv": ("LATIN",),
    "vi": ("LATIN",), "id": ("LATIN",), "ru": ("CYRILLIC",), "uk": ("CYRILLIC",),
    "bg": ("CYRILLIC",), "zh": ("CJK",), "ja": ("HIRAGANA", "KATAKANA", "CJK"),
    "ko": ("HANGUL", "CJK"), "ar": ("ARABIC",), "fa": ("ARABIC",), "he": ("HEBREW",),
    "el": ("GREEK",), "hi": ("DEVANAGARI",), "th": ("THAI",), "bn": ("BENGALI",),
    "ta": ("TAMIL",), "te": ("TELUGU",), "ka": ("GEORGIAN",), "hy": ("ARMENIAN",),
}  # fmt: skip
"""Scripts of a language, as the first word of the Unicode names of its letters."""

NAMES = {
    "english": "en", "spanish": "es", "french": "fr", "german": "de", "italian": "it",
    "portuguese": "pt", "dutch": "nl", "polish": "pl", "turkish": "tr", "swedish": "sv",
    "vietnamese": "vi", "indonesian": "id", "russian": "ru", "ukrainian": "uk", "bulgarian": "bg",
    "chinese": "zh", "japanese": "ja", "korean": "ko", "arabic": "ar", "persian": "fa",
    "hebrew": "he", "greek": "el", "hindi": "hi", "thai": "th", "bengali": "bn", "tamil": "ta",
    "telugu": "te", "georgian": "ka", "armenian": "hy",
}  # fmt: skip

_FREQUENT = {
    "en": "the of and to in is that it was for on are with as be this have from or by not but what"
    " all were when we there can an your which their if will each how so then",
    "es": "el la los las de y en que es por para con una del se lo como más pero sus le ya este sí"
    " porque esta entre cuando muy sin sobre también respuesta entonces",
    "fr": "le la les des et est que une du dans pour qui sur pas plus par avec ce il sont nous vous"
    " cette mais ou où donc réponse alors être aux",
    "de": "der die das und ist nicht ein eine zu den von mit sich des auf für dem im auch als dass"
    " wird sind wir ich oder wenn antwort also daher",
    "it": "il lo gli di e che è per una sono con non del della nel più come anche ma questo si"
    " quindi risposta alla dei delle",
    "pt": "o os as de e que é para uma com não do da em um por mais como mas foi ao dos das então"
    " resposta são isso também",
    "nl": "de het een en van is dat niet op te zijn voor met die aan er ook als maar dit wij wordt"
    " antwoord dus",
}
_FREQUENT_WORDS = {code: frozenset(words.split()) for code, words in _FREQUENT.items()}
_WORD = re.compile(r"[^\W\d_]+")
_MATHS = re.compile(r"\\[A-Za-z]+|\$[^$]*\$|`[^`]*`|</?[a-z_]+>")


def language(completion: str, task: Task) -> Grade:
    """1 if the completion is in the language of the task, otherwise 0. Thoughts count too.

    The language is the column `language` of the task: a code such as `en`, or an English name.
    Without it, the script of the prompt decides.

    Raises:
        ValueError: if the column names an unknown language.
    """
    code = _code(task)
    if forged := forged_turn(completion):
        return Grade(0.0, "rejected", f"spells {forged}")
    text = _MATHS.sub(" ", visible(completion))
    scripts = _scripts_of(text)
    wanted = _SCRIPTS[code] if code else _main_script(task.prompt_text)
    total = sum(scripts.values())
    if not total or not wanted:
        return Grade(1.0, "passed", "no letters to tell the language by")
    foreign = 1 - sum(scripts[script] for script in wanted) / total
    if foreign > MAX_FOREIGN:
        return Grade(0.0, "wrong_answer", f"{foreign:.0%} of the letters are in another script")
    other = _other_language(text, code) if code else ""
    if other:
        return Grade(0.0, "wrong_answer", f"looks like {other}, not {code}")
    return Grade(1.0, "passed")


def _code(task: Task) -> str:
    """Code of the language that the task names, or "" if it names none."""
    named = task.columns.get("language")
    if named is None:
        return ""
    text = str(named).strip().casefold()
    code = NAMES.get(text, re.split(r"[-_]", text)[0])
    if code not in _SCRIPTS:
        raise ValueError(
            f"task {task.id!r}: column language is {named!r}. Use one of {', '.join(_SCRIPTS)}"
        )
    return code


def _main_script(prompt: str) -> tuple[str, ...]:
    """The most frequent script of the prompt, with those that are written together with it."""
    found = _scripts_of(_MATHS.sub(" ", prompt)).most_common(1)
    if not found:
        return ()
    main = found[0][0]
    return next((scripts for scripts in _SCRIPTS.values() if scripts[0] == main), (main,))


def _scripts_of(text: str) -> Counter[str]:
    """Letters per script. An ideograph weighs as much as the three letters of a short word.

    A single letter of another script is a symbol of mathematics (π, Δ) and does not count.
    """
    found: Counter[str] = Counter()
    for word in _WORD.findall(text):
        scripts = Counter(_script(letter) for letter in word)
        if len(word) == 1 and "GREEK" in scripts:
            continue
        for script, letters in scripts.items():
            found[script] += letters * (3 if script in ("CJK", "HIRAGANA", "KATAKANA") else 1)
    return found


@lru_cache(maxsize=8192)
def _script(letter: str) -> str:
    if letter.isascii():
        return "LATIN"
    return unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "UNKNOWN").split(" ")[0]


def _other_language(text: str, code: str) -> str:
    """Another language whose frequent words the text has, more than those of `code`."""
    if code not in _FREQUENT_WORDS:
        return ""
    words = Counter(word.casefold() for word in _WORD.findall(text))
    scores = {
        other: sum(words[word] for word in frequent) for other, frequent in _FREQUENT_WORDS.items()
    }
    best = max(scores, key=lambda other: scores[other])
    return best if scores[best] >= MIN_WORDS and scores[best] > 2 * scores[code] else ""
