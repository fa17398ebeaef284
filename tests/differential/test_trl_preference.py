"""What tests/data/trl_preference.json records is what TRL computes. The daily tests compare our
preference losses with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .peers import peer

peer("trl.trainer.dpo_trainer")
from .trl_preference import recorded  # noqa: E402

FILE = Path(__file__).parents[1] / "data" / "trl_preference.json"


def test_the_record_of_preference_losses_is_trls() -> None:
    kept, made = json.loads(FILE.read_text()), recorded()
    assert kept.keys() == made.keys()
    assert kept["cases"].keys() == made["cases"].keys()
    for name, case in made["cases"].items():
        assert kept["cases"][name]["settings"] == case["settings"], name
        assert kept["cases"][name]["loss"] == pytest.approx(case["loss"], rel=1e-6), name
        for line, expected in zip(kept["cases"][name]["gradient"], case["gradient"], strict=True):
            assert line == pytest.approx(expected, rel=1e-5, abs=1e-9), name
