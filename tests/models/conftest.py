"""Look-alikes, each written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.families import BY_NAME, save_family


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family_folder(name): a model folder of that family. Copy it before changing it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_family(BY_NAME[name], tmp_path_factory.mktemp("families") / name)
        return made[name]

    return get
