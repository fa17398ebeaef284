"""The choice of method and budget by difficulty, against all choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest

from sixfold.data.profile import Measurement, Profile, ProfileKey
from sixfold.errors import UserError
from sixfold.run.fingerprint import rewards_fingerprint
from sixfold_search import Settings, Stepping
from sixfold_search.difficulty import Buckets, Earlier, Trial, Way, check_choice, choose

PATH = Path("profile.jsonl")


def way(budget: int) -> Way:
    return Way("majority", Settings(), Stepping(), "min", budget)


def profile(rates: dict[str, float]) -> Profile:
    made = Profile(ProfileKey("w", "t", {}, {}))
    for key, rate in rates.items():
        solved = round(rate * 8)
        made.add(Measurement(key, key, 1, solved, (1.0,) * solved + (0.0,) * (8 - solved)))
    return made


def test_buckets_have_equal_numbers_of_tasks_and_none_is_empty() -> None:
    rates = [at / 10 for at in range(10)]
    assert Buckets.of(rates, 5).edges == (0.2, 0.4, 0.6, 0.8)
    assert Buckets.of([0.0] * 6 + [0.5, 1.0], 4).edges == (0.5,)
    assert Buckets.of([0.5] * 3, 5).edges == ()
    found = Buckets((0.25, 0.75))
    assert [found.find(rate) for rate in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0, 1, 1, 2, 2]
    assert found.names == [
        "pass rate 0 to below 0.25",
        "pass rate 0.25 to below 0.75",
        "pass rate 0.75 to 1",
    ]


@pytest.mark.parametrize("seed", range(6))
def test_no_other_choice_within_the_limit_solves_more_or_as_many_for_less(seed: int) -> None:
    noise = random.Random(seed)
    keys = [f"{number}" for number in range(23)]
    rates = {key: noise.randrange(9) / 8 for key in keys}
    trials = [
        Trial(
            way(number),
            {key: noise.random() < rates[key] for key in keys},
            {key: noise.randrange(10, 400) for key in keys},
        )
        for number in range(4)
    ]
    earlier = [Earlier(Path(f"{at}"), {}, tuple(trials[at : at + 2])) for at in (0, 2)]
    buckets = Buckets.of(rates.values(), 3)

    def measured(numbers: Sequence[int]) -> tuple[float, float]:
        """Share that is right, and mean tokens with the sign changed."""
        mine = {key: trials[numbers[buckets.find(rates[key])]] for key in keys}
        return (
            fmean(mine[key].solved[key] for key in keys),
            -fmean(mine[key].tokens[key] for key in keys),
        )

    every = [measured(numbers) for numbers in product(range(4), repeat=len(buckets.names))]
    for limit in (None, 250, 210, 190):
        allowed = [one for one in every if limit is None or -one[1] <= limit]
        if not allowed:
            with pytest.raises(UserError, match="--budget"):
                choose(earlier, profile(rates), PATH, 3, limit)
            continue
        found = choose(earlier, profile(rates), PATH, 3, limit)
        numbers = [int(one.budget or 0) for one in found.ways]
        assert measured(numbers) == pytest.approx(max(allowed))
        assert found.tasks == tuple(sorted(keys))


def test_a_choice_is_not_reported_on_its_own_tasks_nor_for_another_model() -> None:
    trial = Trial(way(9), {"a": True, "b": False}, {"a": 5, "b": 5})
    inputs = {"model": "w", "rollout.temperature": 1.0, "weights of --scorer": "s", "scorer": "rm"}
    earlier = [Earlier(Path("old"), inputs, (trial,))]
    choice = choose(earlier, profile({"a": 0.5, "b": 1.0}), PATH, 2, None)
    check_choice(choice, earlier, inputs | {"weights of --scorer": "x"}, {"c": "t3"})  # no scores
    for changed, said in (("model", "model = 'w'"), ("rollout.temperature", "temperature = 1.0")):
        with pytest.raises(UserError, match=said):
            check_choice(choice, earlier, inputs | {changed: "x"}, {"c": "t3"})
    with pytest.raises(UserError, match="1 of its tasks are searched again, such as t2"):
        check_choice(choice, earlier, inputs, {"c": "t3", "b": "t2"})
    scored = Trial(Way("beam", Settings(), Stepping(), "min", 9), trial.solved, trial.tokens)
    with pytest.raises(UserError, match="scorer weights = 's', now 'x'"):
        check_choice(
            choice,
            [Earlier(Path("old"), inputs, (scored,))],
            inputs | {"weights of --scorer": "x"},
            {},
        )


def test_a_choice_by_steps_of_a_function_that_has_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text("def ends(text):\n    return [len(text)]\n")
    name = f"{file}:ends"
    now = {"model": "w", "weights of --scorer": "", "scorer": ""}
    trial = Trial(Way("beam", Settings(), Stepping(name), "min", 9), {"a": True}, {"a": 5})
    inputs = now | {"code of --steps": rewards_fingerprint([name])}
    earlier = [Earlier(Path("old"), inputs, (trial,))]
    choice = choose(earlier, profile({"a": 0.5}), PATH, 1, None)
    check_choice(choice, earlier, now, {})
    file.write_text("def ends(text):\n    return [1, len(text)]\n")
    with pytest.raises(UserError, match="code of --steps"):
        check_choice(choice, earlier, now, {})


def test_what_cannot_be_compared_is_refused() -> None:
    one, two = (
        Earlier(Path(name), {}, (Trial(way(1), {name: True}, {name: 1}),)) for name in ("a", "b")
    )
    with pytest.raises(UserError, match="--choose-from b: its tasks are not those of a"):
        choose([one, two], profile({"a": 0.5, "b": 0.5}), PATH, 2, None)
    with pytest.raises(UserError, match="no pass rate of 1 of 1 tasks, such as a"):
        choose([one], profile({"b": 0.5}), PATH, 2, None)
