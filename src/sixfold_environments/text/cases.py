"""Choose the built-in reward for each case of a file of adversarial cases.

Two forms are read: verifier cases with {kind, sub, prompt, gold, completion, policy}, and attacks
with {lang, code, tests}. Cases of code belong to `environment/code`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sixfold.environment.grade import Grade
from sixfold.types import Task

from .formats import strict_json
from .language import NAMES

_NUMBER = r"(\d+)"
_WORD_LIMITS = (
    (re.compile(rf"between {_NUMBER} and {_NUMBER} words", re.I), ("min_words", "max_words"), 0),
    (re.compile(rf"(?:at least|minimum of|no fewer than) {_NUMBER} words", re.I),
     ("min_words",), 0),
    (re.compile(rf"(?:more than|over) {_NUMBER} words", re.I), ("min_words",), 1),
    (re.compile(rf"(?:at most|up to|maximum of|no more than|within) {_NUMBER} words", re.I),
     ("max_words",), 0),
    (re.compile(rf"(?:fewer than|less than|under) {_NUMBER} words", re.I), ("max_words",), -1),
    (re.compile(rf"(?:exactly |in )?{_NUMBER} words", re.I), ("min_words", "max_words"), 0),
)  # fmt: skip
_LANGUAGE = re.compile(r"\bin (" + "|".join(NAMES) + r")\b", re.IGNORECASE)
_TOOLS = re.compile(r"(\w+)\(([^()]*)\)")
_ARGUMENT = re.compile(r"\s*(\w+)\s*:\s*([^=,]+?)\s*(?:=\s*([^,]+?)\s*)?(?:,|$)")
_PAIR = re.compile(r"\s*A:\s*(?P<a>.+?)\s*/\s*B:\s*(?P<b>.+?)(?:,? then swapped)?\s*", re.DOTALL)
_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array",
    "dict": "object",
}  # fmt: skip


@dataclass(frozen=True)
class TextCase:
    """Checks of one case.

    Attributes:
        completions: one text, or the two texts of a pairwise case.
    """

    reward: str
    task: Task
    completions: tuple[str, ...]

    def value(self, grades: Sequence[Grade]) -> float | None:
        """The reward of the case, from the grades of its completions.

        A pairwise case earns 1 if exactly one text is right: a verifier does not see the order, so
        it prefers the same text in both orders.
        """
        if len(grades) == 1:
            return grades[0].value
        return float(sum(grade.value == 1.0 for grade in grades) == 1)


def text_case(case: Mapping[str, Any]) -> TextCase | None:
    """Checks of a case about text. None for a case of another kind."""
    if case.get("lang") == "text":
        tests = case.get("tests") or {}
        if tests.get("type") != "math":
            return None
        return TextCase("math_strict", _task(case, tests.get("gold")), (str(case["code"]),))
    completion = str(case.get("completion") or "")
    match case.get("kind"):
        case "math":
            # Without a policy the cases assume that only a box has the answer.
            lenient = str(case.get("policy") or "").lower().startswith("lenient")
            return TextCase("math" if lenient else "math_boxed", _task(case), (completion,))
        case "format":
            return _format_case(case, completion)
        case "tool":
            task = _task(case, case.get("gold") or [], tools=_tools(str(case.get("prompt"))))
            return TextCase("tool_calls", task, (completion,))
        case "web":
            return TextCase("web_answer", _task(case), (completion,))
        case "judge":
            pair = _PAIR.fullmatch(completion) if case.get("sub") == "position" else None
            texts = (pair["a"], pair["b"]) if pair else (completion,)
            return TextCase("short_answer", _task(case), texts)
    return None


def _format_case(case: Mapping[str, Any], completion: str) -> TextCase:
    prompt = str(case.get("prompt") or "")
    limits, named = _word_limits(prompt), _LANGUAGE.search(prompt)
    if "<think>" in prompt:
        reward = "think_answer_format" if "<answer>" in prompt else "think_format"
    elif "json" in prompt.lower():
        reward = "json_format"
    elif limits:
        reward = "word_count"
    elif named or case.get("sub") == "lang":
        reward = "language"
    else:
        reward = "no_repetition" if case.get("gold") is None else "math_boxed"
    language = {"language": named[1]} if named else {}
    return TextCase(reward, _task(case, **limits, **language), (completion,))


def _task(case: Mapping[str, Any], answer: Any = None, **columns: Any) -> Task:
    return Task(
        id=str(case.get("id") or case.get("name")),
        prompt=str(case.get("prompt") or ""),
        answer=case.get("gold") if answer is None else answer,
        columns=columns,
    )


def _word_limits(prompt: str) -> dict[str, int]:
    for pattern, columns, shift in _WORD_LIMITS:
        if found := pattern.search(prompt):
            numbers = [int(number) + shift for number in found.groups()]
            return dict(zip(columns, numbers * len(columns), strict=False))
    return {}


def _tools(prompt: str) -> list[dict[str, Any]]:
    """Schemas of `get_weather(city: str, unit: 'C'|'F'='C')` in a prompt."""
    found = []
    for name, signature in _TOOLS.findall(prompt):
        properties: dict[str, Any] = {}
        required = []
        for argument in _ARGUMENT.finditer(signature):
            key, kind, default = argument.groups()
            values = re.findall(r"'([^']*)'", kind)
            properties[key] = (
                {"type": "string", "enum": values} if values else {"type": _TYPES.get(kind, [])}
            )
            if default is None:
                required.append(key)
            else:
                properties[key]["default"] = _default(default)
        found.append({"name": name, "parameters": {"properties": properties, "required": required}})
    return found


def _default(text: str) -> Any:
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    return text[1:-1] if text[0] in "'\"" else strict_json(text)
