"""Tests in another order: `SHUFFLE=1 pytest -p tests.shuffled`, with any number as the seed.

No test may depend on the order. The files are shuffled, and the tests of each file.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    draw = random.Random(os.environ.get("SHUFFLE", ""))
    files: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    order = list(files.values())
    draw.shuffle(order)
    for tests in order:
        draw.shuffle(tests)
    items[:] = [item for tests in order for item in tests]
