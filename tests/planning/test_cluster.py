"""Model copies, memory per pool, splits of devices and the step model: published numbers."""

from __future__ import annotations

import pytest
from tests.planning.course_values import MEMORY_GB, STEP_SECONDS

from sixfold.errors import UserError
from sixfold.planning.balance import balanced_split, ideal_ratio, usual_split
from sixfold.planning.flops import TRAINING, flops_per_token, tokens_per_second
from sixfold.planning.memory_envelope import memory_envelope, pool_memory, typical_shape
from sixfold.planning.model_copies import METHODS, bytes_per_device, model_copies
from sixfold.planning.phase_model import modelled_phases
from sixfold.planning.run_cost import run_hours, run_price
from sixfold.planning.step_time import (
    PhaseSeconds,
    step_time,
    trainer_utilisation,
    useful_tokens_per_second,
)


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


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: model_copies("grp", optional=(), asynchronous=False), "Did you mean 'grpo'"),
        (lambda: model_copies("grpo", optional=("critic",), asynchronous=False), "critic"),
        (lambda: model_copies("dpo", optional=("reward",), asynchronous=False), "reward"),
        (lambda: model_copies("dpo", optional=(), asynchronous=True), "asynchronous"),
        (
            lambda: bytes_per_device(
                model_copies("sft", optional=(), asynchronous=False), 1e9, {"rollout": 1}
            ),
            "devices of trainer",
        ),
    ],
)
def test_bad_methods_are_named(call: object, name: str) -> None:
    with pytest.raises(UserError, match=name):
        call()  # type: ignore[operator]


def test_worked_example_of_eight_h100() -> None:
    """L22: 31.5 + 15, 14, and 14 + 44 GB."""
    memory = pool_memory(
        7e9,
        trainer_devices=4,
        reference_devices=1,
        rollout_devices=3,
        devices_per_engine=1,
        activations_per_device=15e9,
        cached_tokens=1_000_000,
        kv_per_token=131_072,
    )
    assert memory.state == 31.5e9
    assert memory.trainer / 1e9 == pytest.approx(47, abs=0.6)
    assert memory.reference == 14e9
    assert memory.engine_weights == 14e9
    assert memory.kv_cache / 1e9 == pytest.approx(44, abs=0.5)
    assert memory.rollout / 1e9 == pytest.approx(58, abs=0.5)


def test_step_of_the_worked_example() -> None:
    """L22: 1M tokens at 35k tokens/s take about 30 s, with 5 s of training about 35 s per step.

    The 5 s are taken as given: by 6P and 800 TFLOPs, four H100 need 13 s.
    """
    rollout = 1e6 / 35e3
    assert rollout == pytest.approx(30, abs=1.5)
    phases = PhaseSeconds(rollout, 0, 0, 5, 0)
    step = step_time(phases, topology="colocated", reference_on="trainer", sync_hidden=False)
    assert step.seconds == pytest.approx(35, abs=1.5)
    assert step.steps_per_hour == pytest.approx(100, rel=0.1)
    assert run_hours(steps=1000, seconds_per_step=step.seconds) == pytest.approx(10, rel=0.1)
    rate = tokens_per_second(flops_per_token(7e9, TRAINING), flops_per_second=4 * 800e12)
    assert 1e6 / rate == pytest.approx(13.1, abs=0.05)


def test_reference_and_engines_are_sharded() -> None:
    memory = pool_memory(
        7e9,
        trainer_devices=1,
        reference_devices=2,
        rollout_devices=8,
        devices_per_engine=4,
        activations_per_device=0,
        cached_tokens=8000,
        kv_per_token=100,
    )
    assert (memory.reference, memory.engine_weights, memory.kv_cache) == (7e9, 3.5e9, 100_000)


def test_price_and_hours() -> None:
    assert run_hours(steps=1800, seconds_per_step=20) == 10
    assert run_price(hours=10, devices=8, price_per_device_hour=2.5) == 200


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


def test_splits_need_two_devices() -> None:
    with pytest.raises(UserError, match="devices = 1"):
        balanced_split(1, rollout_work=1, trainer_work=1)
    with pytest.raises(UserError, match="devices = 1"):
        usual_split(1)


def test_engines_must_fill_their_devices() -> None:
    with pytest.raises(UserError, match="devices_per_engine = 2 does not divide"):
        pool_memory(
            7e9,
            trainer_devices=4,
            reference_devices=1,
            rollout_devices=3,
            devices_per_engine=2,
            activations_per_device=0,
            cached_tokens=0,
            kv_per_token=1,
        )


@pytest.mark.parametrize(("billions", "devices", "checkpointed", "gigabytes", "fits"), MEMORY_GB)
def test_envelope_oracle(
    billions: int, devices: int, checkpointed: bool, gigabytes: float, fits: bool
) -> None:
    """L22, oracle of the memory widget: 8,192 tokens, 4 sequences, checkpointing keeps 1/8."""
    found = memory_envelope(
        billions,
        length=8192,
        sequences=4,
        devices=devices,
        activation_share=1 / 8 if checkpointed else 1,
        device_bytes=80e9,
    )
    assert found.trainer / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert found.fits is fits
    if (billions, devices) == (7, 8):
        assert found.engine / 1e9 == pytest.approx(2.3, abs=0.05)
        assert found.kv_per_token == 128 * 1024


def test_seventy_billion_need_more_than_sixteen_gpus_for_activations() -> None:
    """Erratum E18: 78.75 GB per GPU before activations."""
    found = memory_envelope(
        70, length=1, sequences=1, devices=16, activation_share=0, device_bytes=80e9
    )
    assert found.state == 78.75e9
    assert found.fits


def test_engine_is_split_over_at_most_one_device_per_key_value_head() -> None:
    found = memory_envelope(
        70, length=8192, sequences=4, devices=16, activation_share=1, device_bytes=80e9
    )
    assert found.engine == pytest.approx((140e9 + 327_680 * 8192 * 4) / 8)


@pytest.mark.parametrize(
    ("billions", "hidden", "layers"),
    [
        (1, 2048, 22),
        (3, 3200, 26),
        (7, 4096, 32),
        (13, 5120, 40),
        (34, 8192, 48),
        (70, 8192, 80),
        (180, 12288, 96),
        (405, 16384, 126),
        (700, 20480, 140),
    ],
)
def test_shapes_of_published_models(billions: float, hidden: int, layers: int) -> None:
    """L22's table."""
    shape = typical_shape(billions)
    assert (shape.hidden, shape.layers) == (hidden, layers)


def test_shapes_are_interpolated() -> None:
    between = typical_shape(10)
    assert (between.hidden, between.layers) == (4608, 36)
    with pytest.raises(UserError, match="billions"):
        typical_shape(0.5)


@pytest.mark.parametrize(
    ("billions", "samples", "length", "topology", "published", "longest"), STEP_SECONDS
)
def test_step_model_as_published(
    billions: int, samples: int, length: int, topology: str, published: float, longest: str
) -> None:
    """L22a, oracle of the wall-clock widget, which divides by four devices twice (E3)."""
    phases = modelled_phases(billions, prompts=64, samples=samples, length=length, devices=16)
    step = step_time(phases, topology=topology, reference_on="trainer", sync_hidden=False)
    assert step.seconds == pytest.approx(published, abs=0.05)
    assert phases.dominant == longest


def test_dominant_phases_as_published() -> None:
    """L22a: rollout is 83 % of all phases at 8,192 tokens; sync is the longest for 70B, K=4."""
    long = modelled_phases(7, prompts=64, samples=16, length=8192, devices=16)
    assert long.dominant == "rollout"
    assert long.rollout / long.total == pytest.approx(0.83, abs=0.005)
    step = step_time(long, topology="disaggregated", reference_on="trainer", sync_hidden=False)
    assert long.rollout / step.seconds == pytest.approx(0.98, abs=0.005)
    assert modelled_phases(70, prompts=64, samples=4, length=1024, devices=16).dominant == "sync"
    big = modelled_phases(70, prompts=64, samples=16, length=1024, devices=16)
    assert (big.rollout, big.sync) == pytest.approx((100.8, 35), abs=0.05)


def test_useful_tokens_as_published() -> None:
    """L22a: 84.7k and 69.1k tokens per second, a loss of 18 % if colocated."""
    phases = modelled_phases(7, prompts=64, samples=16, length=1024, devices=16)
    rates = []
    for topology in ("disaggregated", "colocated"):
        step = step_time(phases, topology=topology, reference_on="trainer", sync_hidden=False)
        rates.append(
            useful_tokens_per_second(
                prompts=64, samples=16, mean_length=1024, keep_rate=1, seconds=step.seconds
            )
        )
    assert rates == pytest.approx([84.7e3, 69.1e3], abs=60)
    assert rates[1] / rates[0] - 1 == pytest.approx(-0.18, abs=0.005)


def test_corrected_step_model() -> None:
    """Erratum E3: with one division, max(41.3, 11.2) + 1.3 = 42.6 s."""
    phases = modelled_phases(7, prompts=64, samples=16, length=1024, devices=4)
    step = step_time(phases, topology="disaggregated", reference_on="trainer", sync_hidden=False)
    assert step.sampling == pytest.approx(41.3, abs=0.05)
    assert step.training == pytest.approx(11.2, abs=0.05)
    assert step.seconds == pytest.approx(42.6, abs=0.05)
    assert trainer_utilisation(phases, step) == pytest.approx(11.2 / 41.3, abs=0.005)
