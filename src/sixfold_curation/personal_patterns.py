"""What personal data and secrets look like. Each finder yields places in a text.

A maths problem is full of numbers, so a number alone is never enough: it has a form that only such
numbers have and a checksum, or a word beside it says what it is.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import NamedTuple

Span = tuple[int, int]
Finder = Callable[[str], Iterator[Span]]

_EMAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9][\w.+%-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+"
    r"[A-Za-z]{2,24}(?![\w@]|[(\[])"
)
_RESERVED = re.compile(
    r"(?:^|[@.])(?:example\.(?:com|org|net|edu)|(?:[\w-]+\.)?(?:example|invalid|test|localhost))$",
    re.IGNORECASE,
)
"""Domains that belong to nobody (RFC 2606)."""


def emails(text: str) -> Iterator[Span]:
    """E-mail addresses, but those of reserved domains, git remotes and code (`a@b.sum(`)."""
    for found in _EMAIL.finditer(text) if "@" in text else ():
        if not _RESERVED.search(found.group()) and not found.group().startswith("git@"):
            yield found.span()


_DIGITS = re.compile(r"\d(?:[ ().-]{0,3}\d){6}")
_PHONE_FORM = re.compile(
    r"(?<![\w.])(?:\+\d[\d ().-]{6,20}\d|\(\d{2,5}\) ?\d{3,4}[-. ]\d{3,5}"
    r"|\d{3}(?P<gap>[-.])\d{3}(?P=gap)\d{4})(?!\w)"
)
_PHONE_WORD = re.compile(
    r"\b(?:phone|telephone|tel|call|mobile|cell|fax|whats\s?app|sms|dial|hotline|telefon"
    r"|t[ée]l[ée]phone|tel[ée]fono|handy)\b",
    re.IGNORECASE,
)
_NEAR = 40
"""Characters between a word and the number that it is about."""
_OPERAND_BEFORE = re.compile(r"(?:[\d)\]}=*/^<>+-]|(?<![A-Za-z])[A-Za-z])\s*$")
_OPERAND_AFTER = re.compile(r"\s*[-+*/=^<>]\s*[\d(A-Za-z\\]")


def phones(regions: tuple[str, ...]) -> Finder:
    """Phone numbers that exist in a numbering plan.

    A number in national form is found if it has the usual grouping of digits, or if a word such as
    "call" comes before it.

    Args:
        regions: countries (ISO 3166) whose national numbers are found.
    """
    import phonenumbers

    def valid(number: str) -> bool:
        for region in (None,) if number.startswith("+") else regions:
            try:
                if phonenumbers.is_valid_number(phonenumbers.parse(number, region)):
                    return True
            except phonenumbers.NumberParseException:
                continue
        return False

    def find(text: str) -> Iterator[Span]:
        if not _DIGITS.search(text):
            return
        for found in _PHONE_FORM.finditer(text):
            apart = not _OPERAND_BEFORE.search(text[max(0, found.start() - 8) : found.start()])
            if apart and not _OPERAND_AFTER.match(text, found.end()) and valid(found.group()):
                yield found.span()
        if not _PHONE_WORD.search(text):
            return
        for region in regions:
            for match in phonenumbers.PhoneNumberMatcher(text, region):
                if _PHONE_WORD.search(text[max(0, match.start - _NEAR) : match.start]):
                    yield match.start, match.end

    return find


_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")


def ibans(text: str) -> Iterator[Span]:
    """International bank account numbers with a right checksum."""
    from stdnum import iban

    for found in _IBAN.finditer(text):
        words = found.group().split(" ")
        for length in range(len(words), 0, -1):
            candidate = " ".join(words[:length])
            if iban.is_valid(candidate):
                yield found.start(), found.start() + len(candidate)
                break


_CARD = re.compile(
    r"(?<![\w.])(?:(?P<grouped>\d{4}(?P<gap>[ -])\d{4}(?P=gap)\d{4}(?P=gap)\d{4}"
    r"|3[47]\d{2}[ -]\d{6}[ -]\d{5})|\d{13,19})(?![\w.]\d|\w)"
)
_ISSUER = re.compile(
    r"4|5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720|3[47]|30[0-5]|3[68]|352[89]|35[3-8]"
    r"|5[06-9]|6"
)
_CARD_WORD = re.compile(
    r"\b(?:card|visa|master\s?card|amex|american express|credit|debit|discover|pan)\b", re.I
)


def cards(text: str) -> Iterator[Span]:
    """Payment card numbers: an issuer's prefix, Luhn's checksum (ISO/IEC 7812), and either groups
    of digits or a word that says so.
    """
    from stdnum import luhn

    for found in _CARD.finditer(text):
        digits = re.sub(r"\D", "", found.group())
        if not _ISSUER.match(digits) or not luhn.is_valid(digits) or len(set(digits)) == 1:
            continue
        if found["grouped"] or _CARD_WORD.search(text[max(0, found.start() - 60) : found.end()]):
            yield found.span()


class NationalId(NamedTuple):
    """A number of persons that some country gives.

    Args:
        pattern: its form.
        module: module of python-stdnum that checks it.
        words: words of which one must stand before it, or "" if the form is its own.
    """

    pattern: str
    module: str
    words: str = ""


NATIONAL_IDS = (
    NationalId(r"\d{3}-\d{2}-\d{4}", "us.ssn"),
    NationalId(r"9\d{2}-\d{2}-\d{4}", "us.itin"),
    NationalId(r"\d{9}", "us.ssn", r"ssn|social security"),
    NationalId(r"[1-8]\d{2}[ -]\d{3}[ -]\d{3}", "ca.sin", r"sin|social insurance"),
    NationalId(r"\d{3} ?\d{3} ?\d{4}", "gb.nhs", r"nhs"),
    NationalId(r"\d{8}-?[A-HJ-NP-TV-Z]", "es.dni"),
    NationalId(r"[XYZ]-?\d{7}-?[A-HJ-NP-TV-Z]", "es.nie"),
    NationalId(r"[A-Z]{6}\d{2}[A-EHLMPR-T]\d{2}[A-Z]\d{3}[A-Z]", "it.codicefiscale"),
    NationalId(r"[12] ?\d{2} ?(?:0[1-9]|1[0-2]) ?\d[\dAB] ?\d{3} ?\d{3} ?\d{2}", "fr.nir"),
    NationalId(r"\d{2} ?\d{3} ?\d{3} ?\d{3}", "de.idnr", r"steuer\S*|tax id\S*|idnr|tin"),
    NationalId(r"\d{9}", "nl.bsn", r"bsn|burgerservicenummer"),
    NationalId(r"\d{11}", "pl.pesel", r"pesel"),
    NationalId(r"\d{6}[-+A]\d{3}[0-9A-Y]", "fi.hetu"),
    NationalId(r"(?:19|20)?\d{6}[-+]\d{4}", "se.personnummer", r"personnummer|personal number"),
    NationalId(r"\d{6}-?\d{4}", "dk.cpr", r"cpr"),
    NationalId(r"\d{11}", "no.fodselsnummer", r"f[øo]dselsnummer|national id\S*"),
    NationalId(r"\d{3}\.\d{3}\.\d{3}-\d{2}", "br.cpf"),
    NationalId(r"\d{11}", "br.cpf", r"cpf"),
    NationalId(r"[2-9]\d{3} ?\d{4} ?\d{4}", "in_.aadhaar", r"a+dhaa?r|uid"),
    NationalId(r"[A-Z]{3}[ABCFGHJLPT][A-Z]\d{4}[A-Z]", "in_.pan"),
    NationalId(r"\d{17}[\dX]", "cn.ric"),
    NationalId(r"\d{6}-[1-8]\d{6}", "kr.rrn"),
    NationalId(r"\d{3} ?\d{3} ?\d{3}", "au.tfn", r"tfn|tax file"),
    NationalId(r"[A-Z]{4}\d{6}[HM][A-Z]{5}[0-9A-Z]\d", "mx.curp"),
)


@cache
def _id_forms() -> list[tuple[re.Pattern[str], Callable[[str], bool], bool]]:
    """Pattern, check, and whether the form alone says what the number is."""
    forms = []
    for row in NATIONAL_IDS:
        before = rf"(?i:\b(?:{row.words})\b)\D{{0,30}}?" if row.words else ""
        pattern = re.compile(rf"{before}(?<![\w.+-])({row.pattern})(?![\w+]|[-.]\d)")
        is_valid = import_module(f"stdnum.{row.module}").is_valid
        forms.append((pattern, is_valid, not row.words))
    return forms


_TASK_BEFORE = re.compile(
    r"\b(?:compute|calculate|evaluate|simplify|subtract|difference|find|solve|expression|value of"
    r"|what is|result of|sum|minus)\W*$",
    re.IGNORECASE,
)


def _is_difference(text: str, start: int, end: int) -> bool:
    """Whether digits with "-" between them are what a task of arithmetic computes."""
    before = text[max(0, start - 24) : start]
    return bool(
        _TASK_BEFORE.search(before)
        or _OPERAND_BEFORE.search(before)
        or re.match(r"\s*[-+*/=^<>]", text[end:])
    )


def national_ids(text: str) -> Iterator[Span]:
    """Social security numbers and other national numbers of persons with a right checksum."""
    if not re.search(r"\d{2}", text):
        return
    for pattern, is_valid, by_form in _id_forms():
        for found in pattern.finditer(text):
            if is_valid(found[1]) and not (by_form and _is_difference(text, *found.span(1))):
                yield found.span(1)


_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_VERSION = re.compile(r"(?:\bv|version|release|section|chapter)\s*$", re.IGNORECASE)


def addresses(text: str) -> Iterator[Span]:
    """IP addresses of the public internet."""
    for pattern in (_IPV4, _IPV6):
        for found in pattern.finditer(text):
            try:
                public = ipaddress.ip_address(found.group()).is_global
            except ValueError:
                continue
            if public and not _VERSION.search(text[max(0, found.start() - 12) : found.start()]):
                yield found.span()


_SECRET = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\bgh[pousr]_[A-Za-z0-9]{36,251}\b|\bgithub_pat_\w{40,}\b"
    r"|\bglpat-[\w-]{20,}"
    r"|\bsk-(?=[A-Za-z_-]{0,200}\d)(?=[\w-]{0,200}?[A-Za-z0-9]{20})[\w-]+"
    r"|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|https://hooks\.slack\.com/services/T\w+/B\w+/\w+"
    r"|\bAIza[\w-]{35}(?![\w-])|\bya29\.[\w-]{20,}"  # Google
    r"|\b[rs]k_live_[A-Za-z0-9]{16,}"  # Stripe
    r"|\bhf_[A-Za-z0-9]{34,}\b|\bnpm_[A-Za-z0-9]{36}\b|\bpypi-AgEIcHlwaS5vcmc[\w-]{50,}"
    r"|\bSG\.[\w-]{22}\.[\w-]{43}"  # SendGrid
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"  # JSON web token
    r"|-----BEGIN (?:[A-Z]+ )?PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]+-----)?",
    re.DOTALL,
)


def secrets(text: str) -> Iterator[Span]:
    """Keys and tokens of services that mark theirs by a prefix."""
    return (found.span() for found in _SECRET.finditer(text))
