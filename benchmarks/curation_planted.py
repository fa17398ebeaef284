"""Recall and precision of the stages of curation on a planted set, and their CPU seconds.

    python benchmarks/curation_planted.py [--rows 10000] [--seed 0] [--forms tuned held_out unseen]
                                          [--write FOLDER] [--wrong]

The set is made by templates (curation_planted.toml, curation_leaks.toml): problems that look alike,
and among them planted faults, each row with its truth. `tuned` are the forms of faults by which
rules and thresholds were chosen, `held_out` others, and `unseen` those that were
written last. `held_out` showed four defects when it was first measured (bold and title case, long
wrappers, "[ans: 4]"), and they were mended. Paraphrases of `held_out` and `unseen` are the same; no
rule was changed for them. The stages run one after the other, each on what the stage before has
kept, and each is judged by its own faults: recall among the planted rows that reach it, precision
among the rows that it drops.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sixfold_curation.decontaminate import Decontaminate
from sixfold_curation.duplicates import Duplicates
from sixfold_curation.gold import Gold
from sixfold_curation.language import Language
from sixfold_curation.licence import Licence
from sixfold_curation.personal_data import PersonalData
from sixfold_curation.stage import Record, Stage, decided

HERE = Path(__file__).parent
TEXTS = tomllib.loads((HERE / "curation_planted.toml").read_text())
LEAKS = tomllib.loads((HERE / "curation_leaks.toml").read_text())

FORMS = ("tuned", "held_out", "unseen")

SHARES = {
    "licence": 0.03,
    "personal_data": 0.03,
    "language": 0.03,
    "leak": 0.02,
    "answer_in_prompt": 0.01,
    "duplicate": 0.04,
    "reformatted": 0.04,
    "near_duplicate": 0.04,
    "conflict": 0.02,
    "wrong_gold": 0.025,
    "open_copy": 0.01,
    "open_word": 0.02,
    "lookalike": 0.06,
}
"""Planted rows of each kind, as a share of all rows. Lookalikes have no fault, nor have prompts
without an answer that differ in one word (`open_word`)."""
OPEN = 0.04
"""Share of rows without a fault that have no answer."""

STAGE_OF = {
    "licence": "licence",
    "personal_data": "personal_data",
    "language": "language",
    "verbatim": "decontaminate",
    "number_swap": "decontaminate",
    "paraphrase": "decontaminate",
    "short": "decontaminate",
    "answer_in_prompt": "decontaminate",
    "duplicate": "duplicates",
    "reformatted": "duplicates",
    "near_duplicate": "duplicates",
    "conflict": "duplicates",
    "open_copy": "duplicates",
    "gold_sum": "gold",
    "gold_differs": "gold",
    "gold_option": "gold",
    "gold_missing": "gold",
    "gold_calculation": "gold",
}


@dataclass(frozen=True)
class Row:
    """One row of the planted set.

    Args:
        prompt: the prompt.
        answer: the reference answer.
        licence: the licence that it states.
        truth: the fault that is planted, or "".
        like: number of the row of which it is a copy, or -1.
        solution: the worked solution, or "".
    """

    prompt: str
    answer: str
    licence: str = "apache-2.0"
    truth: str = ""
    like: int = -1
    solution: str = ""


class Maker:
    """Makes rows.

    Args:
        seed: seed of everything.
        forms: "tuned" or "held_out".
    """

    def __init__(self, seed: int, forms: str) -> None:
        self.random = random.Random(seed)
        self.forms = forms
        self.words = {name: text.split() for name, text in TEXTS["words"].items()}
        self._topical: set[str] = set()

    def filled(self, template: str) -> str:
        """A template with numbers, names and things."""
        pick = self.random
        names, things = pick.sample(self.words["names"], 2), pick.sample(self.words["things"], 2)
        values = {
            **{letter: pick.randint(12, 997) for letter in "abc"},
            **{"d": pick.randint(3, 11), "v": pick.choice("nkmpqtw"), "n": names[0], "m": names[1]},
            **{"i": things[0], "j": things[1], "p": pick.choice(self.words["places"])},
            **{f"e{n}": "".join(pick.choices("123456789", k=n)) for n in (9, 10, 16)},
        }
        return template.format(**values)

    def background(self) -> Row:
        """A row without a fault."""
        pick, texts = self.random, TEXTS["background"]
        if pick.random() < 0.6:
            story = self.filled(pick.choice(texts["stories"]))
            prompt = pick.choice(texts["starts"]) + story + pick.choice(texts["ends"])
        else:
            prompt = self.filled(pick.choice(texts["problems"])) + pick.choice(texts["ends"])
        licence = pick.choice(
            ["apache-2.0", "MIT", "CC BY 4.0", "cc-by-sa-4.0", "CC0", "Apache 2.0"]
        )
        answer = _answer_of(prompt, pick)
        solution = self.solved(int(answer)) if pick.random() < 0.4 else ""
        return Row(prompt, answer, licence, solution=solution)

    def open(self) -> Row:
        """A row without a fault and without an answer."""
        return replace(self.background(), prompt=self.topical(), answer="", solution="")

    def topical(self) -> str:
        """A new prompt about things of which any may stand in the place of another."""
        pick = self.random
        filled = {"t": pick.choice(TEXTS["open"]["topics"].split())}
        filled |= {"l": pick.choice(TEXTS["open"]["languages"].split())}
        filled |= {"i": pick.choice(self.words["things"]), "p": pick.choice(self.words["places"])}
        story = self.filled(pick.choice(TEXTS["background"]["stories"]))
        return self._new(pick.choice(TEXTS["open"]["prompts"]).format(**filled, s=story)) or (
            self.topical()
        )

    def _new(self, prompt: str) -> str:
        """The prompt, or "" if it was made before."""
        known = prompt in self._topical
        self._topical.add(prompt)
        return "" if known else prompt

    def other_topic(self, row: Row) -> Row:
        """The same prompt with one other word."""
        for words in (TEXTS["open"]["topics"].split(), TEXTS["open"]["languages"].split()):
            for word in words:
                if re.search(rf"\b{word}\b", row.prompt):
                    others = [row.prompt.replace(word, other) for other in words if other != word]
                    self.random.shuffle(others)
                    return replace(row, prompt=next(filter(self._new, others)))
        raise ValueError(row.prompt)

    def open_copy(self, row: Row) -> Row:
        form = self.random.choice(TEXTS["open"]["copies"][self.forms])
        return replace(row, prompt=form.format(p=row.prompt))

    def solved(self, answer: int) -> str:
        """A worked solution that ends with an answer."""
        part = self.random.randint(1, 99)
        form = self.random.choice(TEXTS["gold"]["solutions"][self.forms])
        return form.format(a=answer, b=part, c=answer - part, d=2 * answer, e=f"{answer:,}")

    def wrong_gold(self, number: int) -> Row:
        """A row whose answer is wrong by what the row itself says."""
        pick, row, texts = self.random, self.background(), TEXTS["gold"]
        kind = ("sum", "differs", "option", "missing", "calculation")[number % 5]
        right = pick.randint(12, 9999)
        wrong = str(pick.choice([right + 1, right - 1, 10 * right, -right, right + 90]))
        if kind == "sum":
            prompt = self.filled(pick.choice(texts["sums"][self.forms]))
            row = replace(row, prompt=prompt, answer=str(int(_answer_of(prompt, pick)) + 1))
        elif kind == "differs":
            row = replace(row, answer=wrong, solution=self.solved(right))
        elif kind == "option":
            options = texts["options"][self.forms].format(*(right + n for n in range(4)))
            row = replace(row, prompt=f"{row.prompt}\n{options}", answer=pick.choice("EFGH"))
        elif kind == "missing":
            row = replace(row, answer=pick.choice(texts["missing"][self.forms]))
        else:
            form = pick.choice(texts["calculations"][self.forms])
            values = {"x": right, "y": number, "z": right + number + pick.choice([1, -1, 10])}
            row = replace(row, solution=form.format(**values), answer=str(values["z"]))
        return replace(row, truth=f"gold_{kind}")

    def lookalike(self, rows: list[Row]) -> Row:
        """A row that looks like a fault and is none."""
        kind = self.random.choice(["personal", "language", "evaluation", "number", "word", "swap"])
        if kind in TEXTS["lookalikes"]:
            prompt = self.filled(self.random.choice(TEXTS["lookalikes"][kind]))
            return replace(self.background(), prompt=prompt)
        row = self.random.choice(rows)
        if kind == "number":
            prompt = _other_number(row.prompt, self.random)
        elif kind == "word":
            swaps = {"How many": "Which share of the", "left": "gone", "area": "perimeter"}
            swaps |= {"minimum": "maximum", "smallest": "largest", "greatest": "least"}
            prompt = next(
                (row.prompt.replace(a, b) for a, b in swaps.items() if f" {a}" in row.prompt),
                _other_number(row.prompt, self.random),
            )
        else:
            numbers = list(re.finditer(r"\d+", row.prompt))
            prompt = _other_number(row.prompt, self.random)
            if len(numbers) > 1 and numbers[0].group() != numbers[1].group():
                one, two = numbers[:2]
                between = row.prompt[one.end() : two.start()]
                prompt = row.prompt[: one.start()] + two.group() + between + one.group()
                prompt += row.prompt[two.end() :]
        return replace(row, prompt=prompt, answer=_answer_of(prompt, self.random), solution="")

    # Faults, each made from a row without one.

    def licence(self, row: Row) -> Row:
        tuned = [
            "CC BY-NC 4.0",
            "cc-by-nc-sa-4.0",
            "CC-BY-ND-4.0",
            "",
            "apache-2.0 and cc-by-nc-4.0",
        ]
        held_out = [
            "Creative Commons Attribution-NonCommercial 4.0 International", "cc by nc nd 3.0",
            "https://creativecommons.org/licenses/by-nc-sa/4.0/", "unknown", "MIT, CC-BY-NC-2.0",
            "Attribution-NonCommercial-ShareAlike (CC BY-NC-SA)", "non-commercial research only",
        ]  # fmt: skip
        unseen = [
            "CC-BY-NC-ND-4.0", "Licence: CC BY-NC 2.5", "creative commons by-nc-sa v3.0", "n/a",
            "CC BY-ND 3.0 Unported", "All rights reserved", "BSD-3-Clause; CC-BY-NC-4.0",
        ]  # fmt: skip
        forms = {"tuned": tuned, "held_out": held_out, "unseen": unseen}[self.forms]
        return replace(row, licence=self.random.choice(forms))

    def personal_data(self, row: Row) -> Row:
        name = self.random.choice(self.words["names"])
        data = self.random.choice(_PERSONAL[self.forms])(self.random, name)
        around = [f"{row.prompt} Send the result to {data}.", f"{name} ({data}) asks: {row.prompt}"]
        return replace(row, prompt=self.random.choice(around))

    def language(self, row: Row) -> Row:
        prompt = self.filled(self.random.choice(TEXTS["other_languages"][self.forms]))
        return replace(row, prompt=self.wrapped(prompt) if self.random.random() < 0.3 else prompt)

    def answer_in_prompt(self, row: Row) -> Row:
        tuned = ["{p} (Answer: {a})", "{p}\nThe answer is {a}.", "{p} Answer = $\\boxed{{{a}}}$"]
        held_out = ["{p}\n#### {a}", "Hint: the solution is {a}. {p}", "{p} [ans: {a}]"]
        unseen = ["{p} [Solution: {a}]", "Correct answer: {a}\n\n{p}", "{p} (The result is {a}.)"]
        forms = {"tuned": tuned, "held_out": held_out, "unseen": unseen}[self.forms]
        form = self.random.choice(forms)
        return replace(row, prompt=form.format(p=row.prompt, a=row.answer))

    def wrapped(self, prompt: str) -> str:
        before, after = self.random.choice(TEXTS["boilerplate"][self.forms])
        return before + prompt + after

    def duplicate(self, row: Row) -> Row:
        return row

    def reformatted(self, row: Row) -> Row:
        changes = _FORMATS[self.forms]
        prompt = row.prompt
        for change in self.random.sample(changes, 2):
            prompt = change(prompt)
        return replace(row, prompt=prompt)

    def near_duplicate(self, row: Row) -> Row:
        table = list(TEXTS["synonyms"][self.forms])
        self.random.shuffle(table)
        prompt = next((row.prompt.replace(a, b, 1) for a, b in table if a in row.prompt), "")
        if not prompt or self.random.random() < 0.3:
            prompt = self.wrapped(row.prompt)
        return replace(row, prompt=prompt)

    @property
    def tuned(self) -> bool:
        return self.forms == "tuned"


def _digits(pick: random.Random, pattern: str) -> str:
    return re.sub("#", lambda _: pick.choice("0123456789"), pattern)


def _checked(pick: random.Random, pattern: str, is_valid: Callable[[str], bool]) -> str:
    while True:
        number = _digits(pick, pattern)
        if is_valid(number) or is_valid(re.sub(r"\D", "", number)):
            return number


def _with(module: str, pattern: str) -> Callable[[random.Random, str], str]:
    def make(pick: random.Random, name: str) -> str:
        import importlib

        return _checked(pick, pattern, importlib.import_module(f"stdnum.{module}").is_valid)

    return make


def _iban(start: str, digits: int) -> Callable[[random.Random, str], str]:
    def make(pick: random.Random, name: str) -> str:
        from stdnum import iban

        body = _digits(pick, "#" * digits)
        return start + iban.calc_check_digits(f"{start}00{body}") + body

    return make


def _token(prefix: str, length: int) -> Callable[[random.Random, str], str]:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return lambda pick, name: prefix + "".join(pick.choices(letters, k=length - 1)) + "7"


_PERSONAL: dict[str, list[Callable[[random.Random, str], str]]] = {
    "tuned": [
        lambda pick, name: f"{name.lower()}.{pick.randint(1, 99)}@gmail.com",
        lambda pick, name: f"({pick.choice(['212', '415', '617'])}) {_digits(pick, '55#-####')}",
        lambda pick, name: f"+44 20 79{_digits(pick, '## ####')}",
        _with("us.ssn", "5##-##-####"),
        _with("luhn", "4### #### #### ####"),
        _iban("DE", 18),
        _token("ghp_", 36),
        lambda pick, name: f"81.{pick.randint(2, 250)}.{pick.randint(2, 250)}.17",
    ],
    "held_out": [
        lambda pick, name: f"{name}_{pick.randint(1900, 2020)}@mail.uni-{name.lower()}.edu",
        lambda pick, name: f"phone {pick.choice(['303', '206'])}.{_digits(pick, '55#.####')}",
        lambda pick, name: f"+1-312-55{_digits(pick, '#-####')}",
        lambda pick, name: f"+33 6 {_digits(pick, '12 ## ## ##')}",
        _with("br.cpf", "###.###.###-##"),
        _with("luhn", "5200-####-####-####"),
        _iban("FR", 23),
        _token("hf_", 34),
        _token("sk-proj-", 48),
        lambda pick, name: f"2a02:8109:{pick.randint(1000, 9999)}::{pick.randint(10, 99)}",
    ],
    "unseen": [
        lambda pick, name: f"{name[0].lower()}{name.lower()}+school@web.de",
        lambda pick, name: f"cell: 617 {_digits(pick, '55# ####')}",
        lambda pick, name: f"+81 3 {_digits(pick, '5### ####')}",
        lambda pick, name: f"+61 2 9{_digits(pick, '### ####')}",
        lambda pick, name: "RSSMRA85T10A562S",
        _with("kr.rrn", "8#0#1#-1######"),
        _with("luhn", "3782 ###### #####"),
        _iban("CH", 17),
        _token("glpat-", 20),
        _token("xoxb-", 40),
    ],
}

_FORMATS: dict[str, list[Callable[[str], str]]] = {
    "tuned": [
        str.upper,
        lambda text: re.sub(r" ", "  ", text),
        lambda text: text.replace("$", "").rstrip(".?") + " .",
        lambda text: re.sub(r"\$([^$]+)\$", r"\\(\1\\)", text),
        lambda text: text.replace("\\frac", "\\dfrac").replace(", ", " , "),
    ],
    "held_out": [
        lambda text: text.replace(" ", "\u00a0", 3) + "\n",
        lambda text: re.sub(r"(\d)(\d{3})(?!\d)", r"\1,\2", text),
        lambda text: re.sub(r"\$([^$]+)\$", r"$$\1$$", text).replace("?", " ?"),
        lambda text: text.replace(" + ", "+").replace(" = ", "=").replace("-", "−"),
        lambda text: text.replace("(", "\\left( ").replace(")", "\\right)"),
        lambda text: "**" + text.title() + "**",
    ],
    "unseen": [
        lambda text: "> " + text.replace(". ", ".\n> "),
        lambda text: "### " + text.lower(),
        lambda text: text.replace("$", "\\$") if text.count("$") % 2 else text.replace(",", ", "),
        lambda text: re.sub(r"(\d)(\d{3})(?!\d)", r"\1{,}\2", text).replace("?", "?\n\n"),
        lambda text: re.sub(r"\$([^$]+)\$", r"\\[\1\\]", text).replace("How", " How"),
        lambda text: text.translate({ord(a): ord(a) + 0xFEE0 for a in "0123456789"}),
    ],
}


def _answer_of(prompt: str, pick: random.Random) -> str:
    """The sum of a prompt that is one, a number for another prompt."""
    found = re.match(r"\D*?(\d+) ([-+]) (\d+)(?: \* (\d+))?(?=[?.=]| =|$)", prompt)
    if not found or not re.match(r"(What is|Calculate|Compute|Evaluate|Find) ?\d|\d", prompt):
        return str(pick.randint(2, 9999))
    left, right = int(found[1]), int(found[3]) * int(found[4] or 1)
    return str(left + right if found[2] == "+" else left - right)


def _other_number(text: str, pick: random.Random) -> str:
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text + f" Use {pick.randint(10, 99)} as the base."
    found = pick.choice(numbers)
    return (
        text[: found.start()] + str(int(found.group()) + pick.randint(1, 9)) + text[found.end() :]
    )


def leaks(maker: Maker, prompts: list[str], count: int) -> Iterator[Row]:
    """Leaks of the evaluation: as it is in boilerplate, with other numbers, in other words."""
    pick = maker.random
    wording = 1 if maker.tuned else 2
    for number in range(count):
        kind = ("verbatim", "number_swap", "paraphrase", "paraphrase", "short")[number % 5]
        at = pick.randrange(len(LEAKS["evaluation"]))
        values = _values(at)
        if kind == "short":
            text = pick.choice(LEAKS["short"])
        elif kind == "verbatim":
            text = prompts[at]
        elif kind == "number_swap":
            text = _fill(
                LEAKS["evaluation"][at][0], {k: v + pick.randint(1, 50) for k, v in values.items()}
            )
        else:
            text = _fill(LEAKS["evaluation"][at][wording], values)
        if pick.random() < (1.0 if kind == "verbatim" else 0.3):
            text = maker.wrapped(text)
        yield replace(maker.background(), prompt=text, truth=kind)


def _values(at: int) -> dict[str, int]:
    pick = random.Random(at)
    return {letter: pick.randint(2, 120) for letter in "abcd"}


def _fill(template: str, values: dict[str, int]) -> str:
    """Numbers for {a} ...; other braces stay."""
    return re.sub(r"\{([abcd])\}", lambda found: str(values[found[1]]), template)


def planted(rows: int, seed: int, forms: str) -> tuple[list[Row], list[str]]:
    """The planted set, and the prompts of the evaluation."""
    maker = Maker(seed, forms)
    prompts = [_fill(texts[0], _values(at)) for at, texts in enumerate(LEAKS["evaluation"])]
    counts = {kind: int(share * rows) for kind, share in SHARES.items()}
    unanswered = int(OPEN * rows)
    plain = [maker.background() for _ in range(rows - sum(counts.values()) - unanswered)]
    made = [*plain, *(maker.open() for _ in range(unanswered))]
    for kind in ("licence", "personal_data", "language", "answer_in_prompt"):
        make = getattr(maker, kind)
        made += [replace(make(maker.background()), truth=kind) for _ in range(counts[kind])]
    made += leaks(maker, prompts, counts["leak"])
    made += [maker.lookalike(plain) for _ in range(counts["lookalike"])]
    sources = maker.random.sample(range(len(plain)), sum(
        counts[kind] for kind in ("duplicate", "reformatted", "near_duplicate", "conflict")
    ))  # fmt: skip
    for kind in ("duplicate", "reformatted", "near_duplicate", "conflict"):
        for _ in range(counts[kind]):
            at = sources.pop()
            copy = plain[at] if kind == "conflict" else getattr(maker, kind)(plain[at])
            answer = str(int(copy.answer) + 1) if kind == "conflict" else copy.answer
            solution = "" if kind == "conflict" else copy.solution
            made.append(replace(copy, truth=kind, like=at, answer=answer, solution=solution))
    made += [maker.wrong_gold(number) for number in range(counts["wrong_gold"])]
    bases = maker.random.sample(range(len(plain), len(plain) + unanswered), counts["open_copy"])
    made += [replace(maker.open_copy(made[at]), truth="open_copy", like=at) for at in bases]
    others = maker.random.choices(range(len(plain), len(plain) + unanswered), k=counts["open_word"])
    made += [maker.other_topic(made[at]) for at in others]
    order = list(range(len(made)))
    maker.random.shuffle(order)
    place = {at: number for number, at in enumerate(order)}
    found = [replace(made[at], like=place.get(made[at].like, -1)) for at in order]
    return found, [*prompts, *LEAKS["short"]]


def truths(rows: list[Row]) -> dict[int, str]:
    """Fault of each row that should be dropped. Of two copies, the first is kept."""
    found = {at: row.truth for at, row in enumerate(rows) if row.truth}
    for at, row in enumerate(rows):
        if row.truth == "conflict":
            found[row.like] = "conflict"
        elif row.like > at:
            del found[at]
            found[row.like] = row.truth
    return found


def records(rows: list[Row]) -> list[Record]:
    made = []
    for at, row in enumerate(rows):
        fields: dict[str, Any] = {"id": f"planted/{at}", "source": "planted", "prompt": row.prompt}
        fields |= {"answer": row.answer, "licence": row.licence, "solution": row.solution or None}
        made.append(
            Record(
                at,
                f"planted/{at}",
                "planted",
                f"planted.jsonl: row {at + 1}",
                row.prompt,
                row.answer,
                fields,
            )
        )
    return made


def stages(evaluation: Path) -> list[Stage]:
    return [
        Licence(),
        PersonalData(),
        Language(),
        Decontaminate(evaluations=({"data": str(evaluation)},)),
        Duplicates(),
        Gold(),
    ]


@dataclass
class Figures:
    """What a stage found.

    Args:
        kind: kind of the stage.
        right: planted rows that it dropped.
        wrong: other rows that it dropped.
        missed: planted rows that it kept.
        seconds: CPU seconds.
        by_fault: planted and found rows of each fault.
        wrong_rows: examples of rows that it dropped or kept wrongly.
    """

    kind: str
    right: int
    wrong: int
    missed: int
    seconds: float
    by_fault: dict[str, tuple[int, int]]
    wrong_rows: list[str]

    @property
    def recall(self) -> float:
        return self.right / max(self.right + self.missed, 1)

    @property
    def precision(self) -> float:
        return self.right / max(self.right + self.wrong, 1)


def measured(rows: list[Row], prompts: list[str], folder: Path) -> list[Figures]:
    """Figures of each stage, run one after the other."""
    evaluation = folder / "evaluation.jsonl"
    evaluation.write_text("".join(json.dumps({"question": text}) + "\n" for text in prompts))
    truth, left = truths(rows), records(rows)
    figures = []
    for stage in stages(evaluation):
        start = time.process_time()
        decisions, _ = decided(stage, left)
        seconds = time.process_time() - start
        planted_here = {at for at, fault in truth.items() if STAGE_OF[fault] == stage.kind}
        faults, found, wrong = Counter[str](), Counter[str](), []
        for decision in decisions:
            at = decision.record.number
            if at in planted_here:
                faults[truth[at]] += 1
                found[truth[at]] += not decision.kept
            if decision.kept == (at in planted_here):
                wrong.append(
                    f"{truth.get(at)} | {decision.reason} {decision.note} | {rows[at].prompt}"
                )
        dropped = sum(not decision.kept for decision in decisions)
        right = found.total()
        figures.append(
            Figures(stage.kind, right, dropped - right, faults.total() - right, seconds,
                    {fault: (found[fault], faults[fault]) for fault in sorted(faults)}, wrong)
        )  # fmt: skip
        left = [decision.record for decision in decisions if decision.kept]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--write", type=Path, default=Path("/tmp"))
    parser.add_argument("--wrong", action="store_true", help="print the rows decided wrongly")
    chosen = parser.parse_args()
    chosen.write.mkdir(parents=True, exist_ok=True)
    for forms in chosen.forms:
        rows, prompts = planted(chosen.rows, chosen.seed, forms)
        truth = truths(rows)
        with (chosen.write / f"planted_{forms}.jsonl").open("w") as file:
            for record in records(rows):
                line = {**record.fields, "truth": truth.get(record.number, "")}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(f"{forms} forms, {len(rows)} rows, {len(truth)} with a fault")
        figures = measured(rows, prompts, chosen.write)
        for stage in figures:
            print(
                f"  {stage.kind:14} recall {stage.recall:.3f} precision {stage.precision:.3f}"
                f"  {stage.seconds:5.1f} CPU s  {stage.by_fault}"
            )
            if chosen.wrong:
                print(*(f"    {line!r}" for line in stage.wrong_rows), sep="\n", file=sys.stderr)
        print(f"  all stages {sum(stage.seconds for stage in figures):.1f} CPU s")


if __name__ == "__main__":
    main()
