"""The source is parsed once, before the first test that reads it."""

from __future__ import annotations

import pytest
from source import modules


@pytest.fixture(autouse=True, scope="session")
def parsed_source() -> None:
    modules()
