"""Store of a judge's answers, in memory and in a file. So no question is asked twice."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sixfold.files.appended import AppendedFile

from .spending import Cost

log = logging.getLogger("sixfold.judge")


class AnswerStore:
    """Answers by key of the question. The file also has unreadable replies and all costs.

    The file has one JSON line per answered request. A line that a crash has cut off is ignored.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._unwritten: list[bytes] = []
        self._file: AppendedFile | None = None

    def get(self, key: str) -> dict[str, Any] | None:
        """Stored answer to a question, or None."""
        return self._known.get(key)

    def add(self, key: str, answer: dict[str, Any] | None, cost: Cost) -> None:
        """Record an answered request.

        Args:
            answer: fields of the reply. None if it could not be read.
        """
        record: dict[str, Any] = {
            "key": key,
            "answer": answer,
            "prompt_tokens": cost.prompt_tokens,
            "completion_tokens": cost.completion_tokens,
            "usd": cost.usd,
        }
        if answer is not None:
            self._known[key] = answer
        line = json.dumps(record).encode() + b"\n"
        if self._file is None:
            self._unwritten.append(line)
        else:
            self._file.append(line)

    def read(self, folder: Path, name: str = "") -> Cost:
        """Read the answers of all processes of a run.

        Args:
            name: file of this process, or "".

        Returns:
            Cost of the answers in the file `name`.
        """
        spent = Cost()
        for path in sorted(folder.glob("*.jsonl")):
            for record, cost in _records(path):
                spent = spent + cost if path.name == name else spent
                if record.get("answer") is not None:
                    self._known.setdefault(record["key"], record["answer"])
        return spent

    def keep_in(self, folder: Path, name: str) -> Cost:
        """Read the answers in a folder, and write all new ones there.

        Args:
            folder: folder with the files of all processes of the run. It is created.
            name: file of this process.

        Returns:
            Cost of the answers in the file of this process, before anything is added to it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        own, spent = folder / name, self.read(folder, name)
        self.close()
        self._file = AppendedFile(own, log.warning)
        if own.stat().st_size and not own.read_bytes().endswith(b"\n"):
            self._file.append(b"\n")  # end the line that a crash has cut off
        for line in self._unwritten:
            self._file.append(line)
        self._unwritten.clear()
        return spent

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _records(path: Path) -> Iterator[tuple[dict[str, Any], Cost]]:
    """Lines of a file with their costs. Damaged lines are skipped."""
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            tokens = int(record["prompt_tokens"]), int(record["completion_tokens"])
            cost = Cost(1, *tokens, float(record["usd"]))
            record["key"] = str(record["key"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
        yield record, cost
