"""The alarm rings when training reward and held-out reward part, and at nothing less."""

from __future__ import annotations

from sixfold.report.divergence import Divergence


def interval(low: float, high: float) -> dict[str, float]:
    return {"heldout/low": low, "heldout/high": high}


def test_alarm_needs_a_certain_heldout_drop_with_rising_reward() -> None:
    watch = Divergence()
    assert watch.look(10, 0.5, interval(0.4, 0.5)) is None
    assert watch.look(20, 0.6, interval(0.5, 0.6)) is None, "still better"
    assert watch.look(30, 0.7, interval(0.42, 0.52)) is None, "intervals overlap"
    assert watch.look(40, 0.55, interval(0.3, 0.4)) is None, "the training reward fell too"
    said = watch.look(50, 0.8, interval(0.3, 0.4))
    assert (
        said is not None
        and "at least 50.0% at step 20 to at most 40.0%" in said
        and "0.600 to 0.800" in said
    )


def test_a_resumed_run_compares_with_the_same_best_evaluation() -> None:
    first, second = Divergence(), Divergence()
    assert first.look(10, 0.2, {"heldout/low": 0.5, "heldout/high": 0.6}) is None
    second.load(first.state())
    fallen = {"heldout/low": 0.1, "heldout/high": 0.2}
    assert second.look(20, 0.3, fallen) == first.look(20, 0.3, fallen) is not None
    assert second == first
