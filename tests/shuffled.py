"""Tests in another order: `SHUFFLE=1 pytest -p tests.shuffled`, with any number as the seed.

No test may depend on the order.
"""

from __future__ import annotations

import os
import random

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    random.Random(os.environ.get("SHUFFLE", "")).shuffle(items)
