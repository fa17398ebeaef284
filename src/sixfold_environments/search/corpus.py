"""Read a user's corpus: a .jsonl file with one document per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sixfold.errors import UserError

from .index import Document, clean

_TITLE_CHARACTERS = 60
"""Characters of the text that become the title of a document without one."""

_FORM = 'Each line is an object such as {"id": "7", "title": "Tea", "text": "Tea is ..."}'


def read_corpus(path: Path) -> list[Document]:
    """Read the documents of a file.

    Each line has `id` (text or an integer), `text`, and optionally `title`. Other fields are
    ignored.

    Raises:
        UserError: if the file cannot be read, has no documents, or has a line that is malformed,
            lacks a field, or repeats an id.
    """
    where = f"environment.search.corpus = {str(path)!r}"
    documents: dict[str, tuple[int, Document]] = {}
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, document in _documents(file, where):
                first, _ = documents.setdefault(document.id, (number, document))
                if first != number:
                    raise UserError(
                        f"{where}, line {number}: the id {document.id[:80]!r} is already used in"
                        f" line {first}. Give each document a different id"
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{where} cannot be read ({error}). Give a .jsonl file in UTF-8. {_FORM}"
        ) from error
    if not documents:
        raise UserError(f"{where} has no documents. {_FORM}")
    return [document for _, document in documents.values()]


def _documents(lines: Iterator[str], where: str) -> Iterator[tuple[int, Document]]:
    """Number and document of each line that is not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}, line {number}: not JSON ({error}). {_FORM}") from error
            yield number, _document(row, f"{where}, line {number}")


def _document(row: Any, where: str) -> Document:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not an object. {_FORM}")
    name, text, title = row.get("id"), row.get("text"), row.get("title")
    if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
        raise UserError(f"{where}: the field 'id' is {_kind(row, 'id')}. {_FORM}")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: the field 'text' is {_kind(row, 'text')}. {_FORM}")
    if title is not None and not isinstance(title, str):
        raise UserError(f"{where}: the field 'title' is {_kind(row, 'title')}. {_FORM}")
    shown = (title or "").strip() or " ".join(text.split())[:_TITLE_CHARACTERS]
    return Document(clean(str(name)), clean(shown), clean(text))


def _kind(row: dict[str, Any], field: str) -> str:
    """Problem of a field: missing, empty, or of a wrong type."""
    if field not in row:
        return "missing"
    value = row[field]
    return "empty" if isinstance(value, str) else f"of type {type(value).__name__}"
