"""Signal of a prompt pool against L18a's table."""

from __future__ import annotations

import pytest

from sixfold_labs.catalogue import find

TABLE = [
    # policy, curation, K, kept, signal, wasted percent, signal per 100 rollouts
    (20, 0, 8, 1000, 120.5, 42, 1.51),
    (50, 0, 8, 1000, 122.9, 36, 1.54),
    (80, 0, 8, 1000, 120.5, 42, 1.51),
    (80, 80, 8, 160, 38.9, 1, 3.04),
]


@pytest.mark.parametrize("row", TABLE)
def test_signal_of_the_pool(row: tuple[float, ...]) -> None:
    policy, curation, k, kept, signal, wasted, efficiency = row
    outcome = find("signal-density")(policy=int(policy), curation=int(curation), k=int(k))
    assert outcome.values["kept_prompts"] == kept
    assert outcome.number("expected_signal") == pytest.approx(signal, abs=0.05)
    assert 100 * outcome.number("wasted_groups") == pytest.approx(wasted, abs=0.5)
    assert outcome.number("signal_per_100_rollouts") == pytest.approx(efficiency, abs=0.005)


@pytest.mark.parametrize(("policy", "k", "wasted"), [(80, 4, 56), (20, 2, 76), (20, 32, 22)])
def test_wasted_groups_by_group_size(policy: int, k: int, wasted: float) -> None:
    share = find("signal-density")(policy=policy, k=k).number("wasted_groups")
    assert 100 * share == pytest.approx(wasted, abs=0.5)


def test_curation_raises_signal_per_rollout_and_lowers_the_total() -> None:
    lab = find("signal-density")
    assert lab(policy=80).number("expected_signal") > lab(policy=80, curation=80).number(
        "expected_signal"
    )
