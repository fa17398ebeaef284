"""The tools `search` and `read` over a corpus."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path

from sixfold.environment.tools.observation import ToolError
from sixfold.environment.tools.tool import Tool, tool

from .corpus import read_corpus
from .index import SearchError, SearchIndex

READ_CHARACTERS = 4000
"""Maximum number of characters of a document that one call returns."""

RESULTS = 5
"""Default number of results."""

QUICK_DOCUMENTS = 20_000
"""Largest corpus that is searched without a thread. Such a search takes about 1 ms."""


def corpus_tools(path: Path) -> tuple[Tool, Tool]:
    """Make the tools `search` and `read` for a user's corpus.

    Raises:
        UserError: if the file is malformed, or this Python's SQLite has no full-text index.
    """
    return search_tools(SearchIndex(read_corpus(path)))


@lru_cache(maxsize=4)
def search_tools(index: SearchIndex, results: int = RESULTS) -> tuple[Tool, Tool]:
    """Make the tools `search` and `read` for an index. Episodes share them.

    Args:
        index: the corpus.
        results: default number of results.
    """

    @tool
    async def search(query: str, k: int = results) -> list[dict[str, str]]:
        """Find documents by their words. Returns id and title of the best ones, best first.

        Args:
            query: words to look for.
            k: number of results, from 1 to 20.
        """
        try:
            if len(index) <= QUICK_DOCUMENTS:
                found = index.search(query, k)
            else:
                found = await asyncio.to_thread(index.search, query, k)
        except SearchError as error:
            raise ToolError(str(error)) from error
        return [{"id": document.id, "title": document.title} for document in found]

    @tool
    async def read(id: str | int, start: int = 0) -> str:
        """Read a document.

        Args:
            id: id of the document, from a search.
            start: number of characters to skip.
        """
        try:
            text = index.read(str(id)).text
        except SearchError as error:
            raise ToolError(str(error)) from error
        if not 0 <= start < len(text):
            raise ToolError(f"start = {start} must be from 0 to {len(text) - 1}")
        end = start + READ_CHARACTERS
        left = len(text) - end
        note = f"\n({left} more characters from start = {end})" if left > 0 else ""
        return text[start:end] + note

    return search, read
