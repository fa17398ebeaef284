"""Memory per GPU of training and of rollout, for a model of any size."""

from __future__ import annotations

from ..planning.memory_envelope import memory_envelope as envelope
from ..planning.memory_envelope import typical_shape
from .lab import Bars, Breaking, Control, Lab, Outcome

GB = 1e9
GPU_GB = 80.0
CHECKPOINTED = 1 / 8
"""Share of the activations that checkpointing keeps."""


def memory_envelope(
    *, billions: float, length: int, batch: int, gpus: int, checkpointing: bool
) -> Outcome:
    """Memory per GPU.

    Args:
        billions: parameters, in billions.
        length: tokens per sequence.
        batch: sequences per GPU.
        gpus: GPUs that share the training state.
        checkpointing: activation checkpointing.
    """
    memory = envelope(
        billions,
        length=length,
        sequences=batch,
        devices=gpus,
        activation_share=CHECKPOINTED if checkpointing else 1.0,
        device_bytes=GPU_GB * GB,
    )
    shape = typical_shape(billions)
    labels = ("training state", "activations", "rollout: weights and KV cache")
    sizes = [part / GB for part in (memory.state, memory.activations, memory.engine)]
    return Outcome(
        values={
            "train_gb_per_gpu": memory.trainer / GB,
            "infer_gb_per_gpu": memory.engine / GB,
            "kv_kib_per_token": memory.kv_per_token / 1024,
            "activations_gb_per_gpu": memory.activations / GB,
            "width": shape.hidden,
            "layers": shape.layers,
            "training_fits": memory.fits,
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
            low=1.0,
            high=700.0,
            sweep=(1.0, 3.0, 7.0, 13.0, 34.0, 70.0, 180.0, 405.0, 700.0),
        ),
        Control(
            "length",
            8192,
            "tokens per sequence",
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
