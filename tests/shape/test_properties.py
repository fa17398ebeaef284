"""Settings of Hypothesis: a property must not fail because the machine is busy."""

from __future__ import annotations

import pytest
from hypothesis import settings


@pytest.mark.parametrize("profile", ["steady", "daily"])
def test_examples_have_no_deadline(profile: str) -> None:
    """By default, an example that takes 200 ms fails."""
    assert settings.get_profile(profile).deadline is None
    assert settings().deadline is None
