"""Full-text index of documents in memory, ranked by BM25 (SQLite's FTS5)."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sixfold.errors import UserError

MAX_QUERY_WORDS = 32
"""Maximum number of words of a query. Further words are ignored."""

MAX_RESULTS = 20
"""Maximum number of results of one search."""

SEARCH_S = 5.0
"""Time limit of one search, in seconds."""

_TITLE_WEIGHT, _TEXT_WEIGHT = 2.0, 1.0
_WORD = re.compile(r"[^\W_]+")


class SearchError(ValueError):
    """Raised for a query that cannot be answered.

    Attributes:
        kind: "query" (it has no words), "count" (too many or too few results), "unknown" (no such
            document) or "too_long" (it took too long).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Document:
    """One text of a corpus.

    Attributes:
        id: unique within the corpus.
        title: a few words, shown in results.
        text: content, shown by `read`.
    """

    id: str
    title: str
    text: str


class SearchIndex:
    """Thread-safe index of a corpus.

    A query is a set of words. A document matches if it contains at least one of them. Operators of
    FTS5 such as quotation marks, `*` and `AND` have no special meaning. Case and accents are
    ignored.

    Args:
        documents: the corpus, with unique ids.

    Raises:
        UserError: if this Python's SQLite lacks FTS5.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._rows = {document.id: row for row, document in enumerate(documents)}
        self._lock = threading.Lock()
        self._until = 0.0
        self._index = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0
        )
        try:
            self._index.execute(
                "CREATE VIRTUAL TABLE texts USING fts5"
                "(title, text, content='', tokenize='unicode61 remove_diacritics 2')"
            )
        except sqlite3.OperationalError as error:
            raise UserError(
                f"search: SQLite {sqlite3.sqlite_version} of this Python has no full-text index"
                f" FTS5 ({error}). Use a Python whose SQLite has it, such as those of python.org,"
                " conda, uv or Debian"
            ) from error
        self._index.executemany(
            "INSERT INTO texts (rowid, title, text) VALUES (?, ?, ?)",
            ((row, clean(d.title), clean(d.text)) for row, d in enumerate(documents)),
        )
        self._index.set_progress_handler(lambda: time.monotonic() > self._until, 10_000)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, count: int) -> list[Document]:
        """Find the documents that match best, best first. Ties keep the order of the corpus.

        Args:
            query: words.
            count: maximum number of results, from 1 to `MAX_RESULTS`.

        Raises:
            SearchError: if the query has no words, the count is out of range, or the search takes
                too long.
        """
        if not 1 <= count <= MAX_RESULTS:
            raise SearchError("count", f"k = {count} must be from 1 to {MAX_RESULTS}")
        words = list(dict.fromkeys(_WORD.findall(query.casefold())))[:MAX_QUERY_WORDS]
        if not words:
            raise SearchError("query", "the query has no words")
        # In quotation marks, words such as NEAR are not operators of FTS5.
        expression = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            self._until = time.monotonic() + SEARCH_S
            try:
                found = self._index.execute(
                    f"SELECT rowid FROM texts WHERE texts MATCH ?"
                    f" ORDER BY bm25(texts, {_TITLE_WEIGHT}, {_TEXT_WEIGHT}), rowid LIMIT ?",
                    (expression, count),
                ).fetchall()
            except sqlite3.OperationalError as error:
                if "interrupted" not in str(error):
                    raise
                raise SearchError(
                    "too_long", f"the search took longer than {SEARCH_S:g} s; use rarer words"
                ) from error
        return [self._documents[row] for (row,) in found]

    def read(self, name: str) -> Document:
        """Return the document with an id.

        Raises:
            SearchError: if no document has this id.
        """
        if name not in self._rows:
            raise SearchError("unknown", f"there is no document with the id {name[:80]!r}")
        return self._documents[self._rows[name]]


def clean(text: str) -> str:
    """Replace characters that SQLite cannot store: null characters and lone surrogates."""
    return text.replace("\0", " ").encode("utf-8", errors="replace").decode("utf-8")
