"""Search: ranking, any text as a query, and users' corpora."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold_environments.search import index as index_module
from sixfold_environments.search.corpus import read_corpus
from sixfold_environments.search.index import Document, SearchError, SearchIndex

TEXTS = [
    Document("1", "Green tea", "Tea that is not oxidised."),
    Document("2", "Coffee", "A drink of roasted beans. Some prefer tea."),
    Document("3", "Crème brûlée", "A dessert with burnt sugar."),
    Document("4", "AND or NOT", "words of queries"),
]


def found(query: str, count: int = 3) -> list[str]:
    return [document.id for document in SearchIndex(TEXTS).search(query, count)]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("tea", ["1", "2"]),  # both have it in the text, one also in the title
        ("roasted tea", ["2", "1"]),  # one has both words
        ("TEA!!", ["1", "2"]),
        ("creme brulee", ["3"]),
        ("crème", ["3"]),
        ("elephant", []),
        ("elephant coffee", ["2"]),
    ],
)
def test_the_best_document_comes_first(query: str, ids: list[str]) -> None:
    assert found(query) == ids


def test_equal_documents_come_in_the_order_of_the_corpus() -> None:
    same = SearchIndex([Document(str(i), "cup", "a cup") for i in range(9)])
    assert [document.id for document in same.search("cup", 4)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "query",
    [
        'tea"',
        '"tea',
        "tea AND",
        "NOT tea",
        "NEAR(tea",
        "title: tea",
        "tea* OR (",
        "^tea",
        "{title text}: tea",
        "tea'; DROP TABLE texts; --",
        "tea\0",
        "tea \ud800",
        "tea " * 100_000,
        "_tea_",
        "茶 tea 🍵",
    ],
)
def test_any_text_with_a_word_is_a_query(query: str) -> None:
    assert "1" in found(query)


@pytest.mark.parametrize("query", ["", "  ", '"', "*", "\0", "🍵", "\ud800", "_", "()"])
def test_a_query_without_words(query: str) -> None:
    with pytest.raises(SearchError) as caught:
        found(query)
    assert caught.value.kind == "query"


@pytest.mark.parametrize("count", [0, -1, 21, 10**30])
def test_the_number_of_results_is_bounded(count: int) -> None:
    with pytest.raises(SearchError) as caught:
        found("tea", count)
    assert caught.value.kind == "count"


def test_a_document_is_read_by_its_id() -> None:
    assert SearchIndex(TEXTS).read("2") is TEXTS[1]
    with pytest.raises(SearchError) as caught:
        SearchIndex(TEXTS).read("tea")
    assert caught.value.kind == "unknown"


def test_a_search_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SEARCH_S", 0.0)
    many = SearchIndex([Document(str(i), "cup", "a cup of tea " * 5) for i in range(5000)])
    with pytest.raises(SearchError) as caught:
        many.search("cup tea a of", 3)
    assert caught.value.kind == "too_long"


def test_a_python_without_the_full_text_index(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def execute(self, statement: str) -> None:
            raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(index_module.sqlite3, "connect", lambda *a, **k: Old())
    with pytest.raises(UserError, match=r"search: .*FTS5.*Use a Python"):
        SearchIndex(TEXTS)


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_corpus_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '\ufeff{"id": 7, "title": " Tea ", "text": "Tea is a drink.", "extra": [1]}',
        "",
        json.dumps({"id": "8", "text": "word " * 40}),
        '{"id": "9", "title": "", "text": "half \\ud800 and \\u0000"}',
    )
    tea, long, odd = read_corpus(path)
    assert tea == Document("7", "Tea", "Tea is a drink.")
    assert long.title == ("word " * 40)[:60]
    assert odd.text == "half ? and  "
    assert [d.id for d in SearchIndex(read_corpus(path)).search("half", 3)] == ["9"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[1]", "line 2: not an object"),
        ('{"text": "x"}', "'id' is missing"),
        ('{"id": " ", "text": "x"}', "'id' is empty"),
        ('{"id": true, "text": "x"}', "'id' is of type bool"),
        ('{"id": 1.5, "text": "x"}', "'id' is of type float"),
        ('{"id": "2"}', "'text' is missing"),
        ('{"id": "2", "text": " \\n"}', "'text' is empty"),
        ('{"id": "2", "text": ["x"]}', "'text' is of type list"),
        ('{"id": "2", "text": "x", "title": 5}', "'title' is of type int"),
        ('{"id": 1, "text": "x"}', "line 2: the id '1' is already used in line 1"),
    ],
)
def test_a_malformed_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = written(tmp_path, '{"id": "1", "text": "first"}', line)
    with pytest.raises(UserError) as caught:
        read_corpus(path)
    assert "environment.search.corpus = " in str(caught.value) and problem in str(caught.value)


def test_a_corpus_that_cannot_be_used(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"id": "1", "text": "thé"}'.encode("latin-1"))
    for path in (tmp_path / "absent.jsonl", tmp_path, latin, written(tmp_path, "", " ")):
        with pytest.raises(UserError, match=r"environment\.search\.corpus = .*\.jsonl|directory"):
            read_corpus(path)
