"""Rewrites answers in LaTeX, Unicode and Markdown, so that equal ones have the same spelling.

Invariant: white space between digits is never dropped: "1 2" is not 12. Only thousands separators
are removed, where groups have three digits.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPT = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUBSCRIPT = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "⁄": "/",
        "∕": "/",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "∩": r"\cap ",
    }
    | {
        "≤": r"\le ",
        "≥": r"\ge ",
        "⩽": r"\le ",
        "⩾": r"\ge ",
        "→": r"\to ",
        "←": r"\leftarrow ",
        "⇒": r"\Rightarrow ",
        "⇔": r"\Leftrightarrow ",
        "∉": r"\notin ",
        "。": ".",
        "、": ",",
        "≠": r"\ne ",
        "±": r"\pm ",
        "°": r"^\circ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "∨": r"\lor ",
        "∧": r"\land ",
        "∖": r"\setminus ",
        "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}",
        "ℚ": r"\mathbb{Q}",
        "ℕ": r"\mathbb{N}",
        "ℂ": r"\mathbb{C}",
        "…": r"\ldots ",
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "\u2009": r"\,",
        "\u202f": r"\,",
    }
)
_SUPERSCRIPTS = re.compile(f"[{''.join(_SUPERSCRIPT)}]+")
_SUBSCRIPTS = re.compile(f"[{''.join(_SUBSCRIPT)}]+")
_RADICAL = re.compile(r"([√∛∜])\s*(\d+|[A-Za-z]|\([^()]*\))")
_DEGREE_OF_ROOT = {"√": "", "∛": "[3]", "∜": "[4]"}

_GROUPED = r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?"

# The order matters: remove thousands separators before the spacing commands that look like them
# become spaces. A backslash after another backslash belongs to a row break of a matrix, not to a
# spacing command.
_REWRITES = [
    (re.compile(pattern, re.IGNORECASE if "answer" in pattern else 0), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3}(?!\d))", ""),
        (
            r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])",
            "",
        ),
        (r"\\(?:textcolor|color|colorbox)\s*\{[A-Za-z0-9!]*\}", ""),
        (r"\\(?:bm|boldsymbol|underline|emph)(?=\s*\{)", ""),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"(?<!\\)\\!", ""),
        (r"\.{3,}", r"\\ldots "),
        (r"(?<!\\)\\[,;: \n]|(?<!^)~|^~(?![A-Za-z])|\\q?quad(?![A-Za-z])", " "),
        (r"(?<!\\)\\[()\[\]]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\(?:(?:math|text)(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname)(?=\s*\{)",
            r"\\text",
        ),
        (
            r"^\s*(?:\\text\s*\{\s*)?(?:the\s+)?(?:final\s+|correct\s+)?"
            r"(?:answer|result|solution|value)\s*(?:is\b|:|=)\s*\}?\s*(?=\S)",
            "",
        ),
        (r"^\s*=\s*", ""),
        (r"^\s*\\text\s*\{([^{}]*\d[^{}]*)\}\s*$", r"\1"),
        (r"^\s*(?:\\text\s*\{\s*)?(?:positive\s+)?infinity\s*\}?\s*$", r"\\infty"),
        (r"^\s*(?:\\text\s*\{\s*)?negative\s+infinity\s*\}?\s*$", r"-\\infty"),
        (r"(?<=[\d}])\s*\\text\s*\{\s*(?:\\?%|per\s?cent)\s*\}", "%"),
        (r"(?<=\d)\s*per\s?cent\b", "%"),
        (r",\s*(?:\\text\s*\{\s*and\s*\}|and\b)", ","),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\%", "%"),
        (r"(?<!\\)\\&", ","),
        (r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
        (r"\\rightarrow(?![A-Za-z])", r"\\to"),
        (r"=<", r"\\le "),
        (r"(?<=\s)!=", r"\\ne "),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"^\s*([-+]?\d[\d./ ]*)\s*'\s*$", r"\1 \\text{ ft}"),
        (r"^\s*([-+]?\d[\d./ ]*)\s*(?:''|\")\s*$", r"\1 \\text{ in}"),
        (rf"^\s*\{{(?!{_GROUPED}\}})([^()\[\]{{}}]*,[^()\[\]{{}}]*)\}}\s*$", r"\\{\1\\}"),
        (r"_\{(\w)\}", r"_\1"),
        (r"\s+", " "),
    )
]

_EMPHASIS = re.compile(r"^(\*+)(.+?)\1$|^\*{2,}|\*{2,}$|(?<![A-Za-z])\*$", re.DOTALL)
_FORMULA_FIRST = re.compile(r"\$([^$]+)\$\s+([A-Za-z][A-Za-z /]*)\.?")
_REVERSED_ENDS = re.compile(
    r"(\])([^\[\]()]+,[^\[\]()]+)([\[\])])|([\[(])([^\[\]()]+,[^\[\]()]+)(\[)"
)
_QUOTED = re.compile(r"""(?:\\text\s*\{\s*)?["`']{1,2}([^"`'{}]+)["']{1,2}\s*\}?""")


def normalise(text: str) -> str:
    """Rewrite a text so that texts that look the same when typeset become equal.

    This covers LaTeX spacing, delimiters, and Unicode digits and signs. The result is still LaTeX,
    and spaces are kept.
    """
    text = text if text.isascii() else _ascii_maths(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _EMPHASIS.sub(lambda m: m[2] or "", text.strip()).strip()
    if text.startswith("$") and text.endswith("$") and len(text) > 1:
        text = text.strip("$").strip()
    elif formula := _FORMULA_FIRST.fullmatch(text):  # $42$ dollars
        text = f"{formula[1]} {formula[2]}"
    if reversed_ends := _REVERSED_ENDS.fullmatch(text):  # ]3,5[
        left, inside, right = [part for part in reversed_ends.groups() if part is not None]
        text = f"{left.replace(']', '(')}{inside}{right.replace('[', ')')}"
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[1].strip()
    return text.rstrip(".,;: ").lstrip()


def _ascii_maths(text: str) -> str:
    """Convert mathematical Unicode characters to LaTeX.

    This runs before NFKC, which would turn 5² into 52 and 3½ into 31/2.
    """
    text = _SUPERSCRIPTS.sub(lambda m: "^{" + "".join(_SUPERSCRIPT[c] for c in m[0]) + "}", text)
    text = _SUBSCRIPTS.sub(lambda m: "_{" + "".join(_SUBSCRIPT[c] for c in m[0]) + "}", text)
    text = _RADICAL.sub(
        lambda m: rf"\sqrt{_DEGREE_OF_ROOT[m[1]]}{{{m[2].strip('()')}}}", text
    ).translate(_SYMBOLS)
    return "".join(_ascii_character(c) for c in text)


def _ascii_character(character: str) -> str:
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category == "Cf":  # zero-width space and similar characters
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(character))
    folded = unicodedata.normalize("NFKC", character)
    if "\N{FRACTION SLASH}" in folded:
        numerator, denominator = folded.split("\N{FRACTION SLASH}")
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return folded.replace("\N{MINUS SIGN}", "-")
