"""Size of the KV cache and the time to read it, on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome
from sixfold_planning.memory import cache_bytes, kv_bytes_per_token

GIB = 1024**3
HBM_GIB = 80.0
BANDWIDTH_GIB_S = 3350.0
BFLOAT16 = 2
GROUPED_KV_HEADS = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model. Weights in GiB."""

    layers: int
    heads: int
    head_dim: int
    weights: float


MODELS = {"7b": Sizes(32, 32, 128, 14.0), "70b": Sizes(80, 64, 128, 140.0)}


def bottleneck(kv: float, weights: float) -> str:
    """What limits decoding. Both sizes in GiB."""
    if kv > HBM_GIB - weights:
        return "capacity"
    if kv > 5 * weights:
        return "kv cache, more than 5 times the weights"
    return "kv cache" if kv > weights else "weights"


def kv_sizer(*, batch: int, length: int, grouped: bool, model: str) -> Outcome:
    """Size the KV cache."""
    sizes = MODELS[model]
    per_token = kv_bytes_per_token(
        layers=sizes.layers,
        kv_heads=GROUPED_KV_HEADS if grouped else sizes.heads,
        head_dim=sizes.head_dim,
        width=BFLOAT16,
    )
    kv = cache_bytes(per_token, sequences=batch, length=length) / GIB
    free = max(0.0, HBM_GIB - sizes.weights)
    return Outcome(
        values={
            "kib_per_token": per_token / 1024,
            "kv_gib": kv,
            "free_gib": free,
            "kv_ms_per_step": 1000 * kv / BANDWIDTH_GIB_S,
            "weights_ms_per_step": 1000 * sizes.weights / BANDWIDTH_GIB_S,
            "sequences_that_fit": int(free * GIB / (per_token * length)),
            "bottleneck": bottleneck(kv, sizes.weights),
        },
        figures=(
            Bars("Memory", "GiB", ("weights", "KV cache", "HBM"), (sizes.weights, kv, HBM_GIB)),
        ),
    )


KV_SIZER = Lab(
    name="kv-sizer",
    title="KV cache: bytes per token, what fits beside the weights, and time to read it",
    about=(
        "A token has 2 * layers * kv_heads * head_dim * 2 bytes of keys and values in bfloat16. A"
        " decode step reads the weights once and the whole cache. A larger batch reads the weights"
        " less often per token, but not the cache. The GPU has 80 GiB and reads 3350 GiB/s."
        " (An H100 has 3350 decimal GB/s, so it reads 7 % more slowly.) 7b: 32 layers, 32 heads,"
        " 14 GiB; 70b: 80 layers, 64 heads, 140 GiB; heads of 128. Grouped-query attention has 8"
        " key-value heads."
    ),
    controls=(
        Control(
            "batch", 32, "concurrent sequences", low=1, high=512, sweep=(1, 8, 32, 128, 256, 512)
        ),
        Control(
            "length",
            2048,
            "tokens per sequence",
            unit="tokens",
            low=128,
            high=32768,
            sweep=(128, 512, 2048, 8192, 32768),
        ),
        Control("grouped", True, "grouped-query attention with 8 key-value heads"),
        Control("model", "7b", "model", choices=tuple(MODELS)),
    ),
    run=kv_sizer,
    breaking=Breaking(
        breaks={"batch": 256, "length": 8192, "model": "70b"},
        safe={"batch": 256, "length": 2048, "model": "7b"},
        why="The cache needs 640 GiB, and the weights alone exceed the 80 GiB of the GPU.",
        failed=lambda outcome: outcome.values["bottleneck"] == "capacity",
    ),
)

LABS = (KV_SIZER,)
