"""KV sizer and memory envelope against L20 and L22."""

from __future__ import annotations

import pytest
from tests.planning.course_values import MEMORY_GB

from sixfold_labs.catalogue import find


@pytest.mark.parametrize(
    ("batch", "length", "grouped", "model", "kib", "gib", "free", "ms", "limit"),
    [
        (32, 2048, True, "7b", 128, 8.0, 66, 2.39, "weights"),
        (32, 2048, False, "7b", 512, 32.0, 66, 9.55, "kv cache"),
        (256, 2048, True, "7b", 128, 64.0, 66, 19.1, "kv cache"),
        (256, 8192, True, "70b", 320, 640.0, 0, None, "capacity"),
    ],
)
def test_size_of_the_kv_cache(
    batch: int,
    length: int,
    grouped: bool,
    model: str,
    kib: float,
    gib: float,
    free: float,
    ms: float | None,
    limit: str,
) -> None:
    outcome = find("kv-sizer")(batch=batch, length=length, grouped=grouped, model=model)
    assert outcome.values["kib_per_token"] == kib
    assert outcome.values["kv_gib"] == gib
    assert outcome.values["free_gib"] == free
    assert outcome.values["bottleneck"] == limit
    if ms is not None:
        assert outcome.number("kv_ms_per_step") == pytest.approx(ms, abs=0.05)


def test_sequences_that_fit_beside_the_weights() -> None:
    # 66 GiB / (2048 tokens * 128 KiB) = 264
    assert find("kv-sizer")().values["sequences_that_fit"] == 264


@pytest.mark.parametrize(("billions", "gpus", "checkpointing", "train", "fits"), MEMORY_GB)
def test_training_memory_per_gpu(
    billions: float, gpus: int, checkpointing: bool, train: float, fits: bool
) -> None:
    outcome = find("memory-envelope")(billions=billions, gpus=gpus, checkpointing=checkpointing)
    assert outcome.number("train_gb_per_gpu") == pytest.approx(train, abs=0.06)
    assert outcome.values["training_fits"] is fits


def test_inference_memory_of_the_default() -> None:
    outcome = find("memory-envelope")()
    assert outcome.number("infer_gb_per_gpu") == pytest.approx(2.3, abs=0.05)
    assert outcome.values["kv_kib_per_token"] == 128
    whole = find("memory-envelope")(checkpointing=False).number("activations_gb_per_gpu")
    assert whole == pytest.approx(137.44, abs=0.005)


@pytest.mark.parametrize(
    ("billions", "size"),
    [(1, (2048, 22)), (7, (4096, 32)), (10, (4608, 36)), (405, (16384, 126)), (700, (20480, 140))],
)
def test_dimensions_between_usual_models(billions: float, size: tuple[int, int]) -> None:
    outcome = find("memory-envelope")(billions=billions)
    assert (outcome.values["width"], outcome.values["layers"]) == size
