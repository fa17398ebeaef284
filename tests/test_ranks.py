"""Ranks of torchrun's environment."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.ranks import ALONE, torchrun_ranks


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE = '-1'"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK = 'x'"),
    ],
)
def test_wrong_environment_is_refused(
    environment: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{named}.*torchrun"):
        torchrun_ranks("cpu", 1.0)


@pytest.mark.parametrize("size", ["0", "1"])
def test_one_process_is_alone(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert torchrun_ranks("cpu", 1.0) is ALONE
