"""Memory per GPU of training and of rollout, for a model of any size."""

from __future__ import annotations

from bisect import bisect_left

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome
from sixfold_planning.memory import (
    INFERENCE_WIDTH,
    STATES,
    activation_bytes,
    cache_bytes,
    inference_bytes,
    kv_bytes_per_token,
    training_bytes,
)

GB = 1e9
GPU_GB = 80.0
CHECKPOINTED = 1 / 8
"""Share of the activations that checkpointing keeps."""

WIDTH, KV_HEADS, HEAD_DIM = 2, 8, 128
SHAPES = (
    (1, 2048, 22),
    (3, 3200, 26),
    (7, 4096, 32),
    (13, 5120, 40),
    (34, 8192, 48),
    (70, 8192, 80),
    (180, 12288, 96),
    (405, 16384, 126),
    (700, 20480, 140),
)
"""Billions of parameters, width and layers of published dense models."""


def typical_shape(billions: float) -> tuple[int, int]:
    """Width and layers of a typical dense model, interpolated between published ones.

    Args:
        billions: parameters in billions, 1 to 700.
    """
    above = max(1, bisect_left([row[0] for row in SHAPES], billions))
    (low, low_hidden, low_layers), (high, high_hidden, high_layers) = SHAPES[above - 1 : above + 1]
    part = (billions - low) / (high - low)
    hidden = low_hidden + part * (high_hidden - low_hidden)
    layers = round(low_layers + part * (high_layers - low_layers))
    return round(hidden / HEAD_DIM) * HEAD_DIM, layers


def memory_envelope(
    *, billions: float, length: int, batch: int, gpus: int, checkpointing: bool
) -> Outcome:
    """Memory per GPU."""
    hidden, layers = typical_shape(billions)
    activations = activation_bytes(
        layers=layers, hidden=hidden, length=length, sequences=batch, width=WIDTH
    ) * (CHECKPOINTED if checkpointing else 1.0)
    kv = kv_bytes_per_token(layers=layers, kv_heads=KV_HEADS, head_dim=HEAD_DIM, width=WIDTH)
    state = training_bytes(billions * 1e9, STATES["bfloat16"]) / gpus
    weights = inference_bytes(billions * 1e9, INFERENCE_WIDTH)
    engine = (weights + cache_bytes(kv, sequences=batch, length=length)) / min(gpus, KV_HEADS)
    labels = ("training state", "activations", "rollout: weights and KV cache")
    sizes = [part / GB for part in (state, activations, engine)]
    return Outcome(
        values={
            "train_gb_per_gpu": (state + activations) / GB,
            "infer_gb_per_gpu": engine / GB,
            "kv_kib_per_token": kv / 1024,
            "activations_gb_per_gpu": activations / GB,
            "width": hidden,
            "layers": layers,
            "training_fits": state + activations <= GPU_GB * GB,
        },
        figures=(Bars("Memory per GPU", "GB", labels, sizes),),
    )


MEMORY_ENVELOPE = Lab(
    name="memory-envelope",
    title="Does it fit: training and rollout memory per GPU for 1 to 700 billion parameters",
    about=(
        "Training holds 18 bytes per parameter, sharded over the GPUs, and the activations"
        " N L B (12 d + 2 L) * 2 bytes of a micro-batch, which are not sharded; checkpointing keeps"
        " an eighth. Rollout holds 2 bytes per parameter and the KV cache of 8 key-value heads,"
        " split over min(GPUs, 8). Width d and layers N are interpolated between usual models. A"
        " GPU has 80 GB."
    ),
    controls=(
        Control(
            "billions",
            7.0,
            "parameters, billions",
            unit="billion",
            low=1.0,
            high=700.0,
            sweep=(1.0, 3.0, 7.0, 13.0, 34.0, 70.0, 180.0, 405.0, 700.0),
        ),
        Control(
            "length",
            8192,
            "tokens per sequence",
            unit="tokens",
            low=1024,
            high=65536,
            sweep=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
        ),
        Control("batch", 4, "sequences per GPU", low=1, high=128, sweep=(1, 2, 4, 8, 32, 128)),
        Control("gpus", 8, "GPUs", low=1, high=64, sweep=(1, 2, 4, 8, 16, 32, 64)),
        Control("checkpointing", True, "activation checkpointing"),
    ),
    run=memory_envelope,
    breaking=Breaking(
        breaks={"checkpointing": False},
        safe={"checkpointing": True},
        why="Activations of 8192 tokens grow with the square of the length and exceed the GPU.",
        failed=lambda outcome: outcome.values["training_fits"] is False,
    ),
)

LABS = (MEMORY_ENVELOPE,)
