"""Model copies, memory per pool, splits of devices and the step model: published numbers."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold_planning.balance import balanced_split, ideal_ratio, usual_split
from sixfold_planning.flops import TRAINING, flops_per_token, tokens_per_second
from sixfold_planning.memory import STATES, cache_bytes, inference_bytes, training_bytes
from sixfold_planning.pools import METHODS, bytes_per_device, model_copies
from sixfold_planning.step_time import PhaseSeconds, step_time


@pytest.mark.parametrize(
    ("method", "models"),
    [("sft", (1, 1)), ("dpo", (2, 2)), ("ppo", (4, 4)), ("grpo", (2, 3)), ("rlaif", (2, 4))],
)
def test_models_in_memory(method: str, models: tuple[int, int]) -> None:
    """S2's table: 1, 2, 4, 2-3 and 2-4."""
    assert METHODS[method].models == models


def _per_parameter(method: str, **chosen: object) -> dict[str, float]:
    options = {"optional": (), "asynchronous": False, **chosen}
    copies = model_copies(method, **options)  # type: ignore[arg-type]
    return {copy.role: copy.bytes_per_parameter for copy in copies}


def test_four_copies() -> None:
    """L22: trainer 18, reference 2, rollout 2, old snapshot 2. GRPO drops PPO's critic."""
    grpo = {"policy": 18, "reference": 2, "reward": 2, "engine": 2}
    assert _per_parameter("grpo", optional=("reward",)) == grpo
    assert _per_parameter("ppo") == {**grpo, "critic": 18}
    assert _per_parameter("grpo", optional=("reward",), asynchronous=True) == {
        **grpo,
        "snapshot": 2,
    }
    assert _per_parameter("dpo") == {"policy": 18, "reference": 2}


def test_copies_are_sharded_over_their_pools() -> None:
    """L22: 18/N, 2/N and 2/N_inf for 7B."""
    copies = model_copies("grpo", optional=(), asynchronous=True)
    found = bytes_per_device(copies, 7e9, {"trainer": 4, "reference": 1, "rollout": 2})
    assert found == pytest.approx({"trainer": 20 * 7e9 / 4, "reference": 14e9, "rollout": 7e9})


def test_worked_example_of_eight_h100() -> None:
    """L22: 31.5 + 15, 14, and 14 + 44 GB."""
    state = training_bytes(7e9, STATES["bfloat16"]) / 4
    assert state == 31.5e9
    assert (state + 15e9) / 1e9 == pytest.approx(47, abs=0.6)
    weights = inference_bytes(7e9, 2)
    assert weights == 14e9
    cache = cache_bytes(131_072, sequences=1, length=1_000_000) / 3
    assert cache / 1e9 == pytest.approx(44, abs=0.5)
    assert (weights + cache) / 1e9 == pytest.approx(58, abs=0.5)
    copies = model_copies("grpo", optional=(), asynchronous=False)
    pools = bytes_per_device(copies, 7e9, {"trainer": 4, "reference": 1, "rollout": 1})
    assert pools == {"trainer": state, "reference": 14e9, "rollout": weights}


def test_step_of_the_worked_example() -> None:
    """L22: 1M tokens at 35k tokens/s take about 30 s, with 5 s of training about 35 s per step.

    The 5 s are taken as given: by 6P and 800 TFLOPs, four H100 need 13 s.
    """
    rollout = 1e6 / 35e3
    assert rollout == pytest.approx(30, abs=1.5)
    phases = PhaseSeconds(rollout, 0, 0, 5, 0)
    step = step_time(phases, topology="colocated", sync_hidden=False)
    assert step.seconds == pytest.approx(35, abs=1.5)
    assert step.steps_per_hour == pytest.approx(100, rel=0.1)
    rate = tokens_per_second(flops_per_token(7e9, TRAINING), flops_per_second=4 * 800e12)
    assert 1e6 / rate == pytest.approx(13.1, abs=0.05)


def test_ideal_ratio() -> None:
    """L22: rollout_tokens / gen_tput = train_tokens / train_tput; sampling is 3-6 times slower."""
    found = ideal_ratio(
        rollout_tokens=1e6, trainer_tokens=1e6, rollout_rate=19.0e3 / 4, trainer_rate=19.0e3
    )
    assert found == pytest.approx(4)
    kept = ideal_ratio(rollout_tokens=2e6, trainer_tokens=1e6, rollout_rate=10e3, trainer_rate=10e3)
    assert kept == 2


def test_balanced_split() -> None:
    """100 s and 60 s of work on 32 devices: 20 sample, and a step takes 160 s."""
    split = balanced_split(32, rollout_work=100 * 32, trainer_work=60 * 32)
    assert (split.rollout, split.trainer) == (20, 12)
    assert split.seconds == pytest.approx(160)
    assert split.ratio == pytest.approx(100 / 60)


@pytest.mark.parametrize("devices", [2, 3, 7, 50])
def test_balanced_split_is_the_best_of_all(devices: int) -> None:
    split = balanced_split(devices, rollout_work=31, trainer_work=11)
    best = min(max(31 / n, 11 / (devices - n)) for n in range(1, devices))
    assert split.seconds == best
    assert split.rollout + split.trainer == devices


def test_of_equal_splits_the_one_with_more_training_is_chosen() -> None:
    split = balanced_split(3, rollout_work=1, trainer_work=1)
    assert (split.rollout, split.trainer) == (1, 2)


def test_usual_split_is_two_to_one() -> None:
    assert usual_split(9) == (6, 3)
    assert usual_split(48) == (32, 16)
    assert usual_split(2) == (1, 1)


def test_seventy_billion_need_more_than_sixteen_gpus_for_activations() -> None:
    """Erratum E18: 78.75 GB per GPU before activations."""
    assert training_bytes(70e9, STATES["bfloat16"]) / 16 == 78.75e9


def test_a_split_of_phases_without_time_is_refused() -> None:
    """A hardware file may say that all calls of the engine or the trainer take no time."""
    for work in ({"rollout_work": 0, "trainer_work": 1}, {"rollout_work": 1, "trainer_work": 0}):
        with pytest.raises(UserError, match="_work = 0: must be a finite number above 0"):
            balanced_split(8, **work)
