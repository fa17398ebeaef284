"""Memory of whole clusters from a parameter count, without a config.json."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from . import checks
from .activations import activation_bytes
from .kv_cache import cache_bytes, kv_bytes_per_token
from .training_bytes import INFERENCE_WIDTH, STATES, inference_bytes, training_bytes


@dataclass(frozen=True)
class Shape:
    """Typical sizes of a decoder.

    Attributes:
        hidden: width of the residual stream.
        layers: number of blocks.
        kv_heads: key-value heads.
        head_dim: numbers per head.
    """

    hidden: int
    layers: int
    kv_heads: int
    head_dim: int


_SHAPES = (
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

_KV_HEADS, _HEAD_DIM = 8, 128


def typical_shape(billions: float) -> Shape:
    """Sizes of a typical dense model, interpolated between published ones.

    For a real model, use its config.json: `sixfold.recipe.model_size`.

    Args:
        billions: parameters in billions, 1 to 700.

    Raises:
        UserError: if the size is outside the table.
    """
    checks.positive(billions=billions)
    sizes = [row[0] for row in _SHAPES]
    checks.between(sizes[0], sizes[-1], billions=billions)
    above = max(1, bisect_left(sizes, billions))
    (low, low_hidden, low_layers), (high, high_hidden, high_layers) = _SHAPES[above - 1 : above + 1]
    part = (billions - low) / (high - low)
    hidden = low_hidden + part * (high_hidden - low_hidden)
    return Shape(
        hidden=round(hidden / _HEAD_DIM) * _HEAD_DIM,
        layers=round(low_layers + part * (high_layers - low_layers)),
        kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
    )


@dataclass(frozen=True)
class Envelope:
    """Memory per device of a trainer, and of an engine on the same devices.

    Attributes:
        state: sharded weights, gradients and optimizer state, in bytes.
        activations: activations of one micro-batch per device, in bytes.
        engine: sharded weights and KV cache of the engine, in bytes.
        kv_per_token: KV cache of one token over all devices, in bytes.
        fits: the trainer's memory is at most that of a device.
    """

    state: float
    activations: float
    engine: float
    kv_per_token: int
    fits: bool

    @property
    def trainer(self) -> float:
        """Bytes per device while training."""
        return self.state + self.activations


def memory_envelope(
    billions: float,
    *,
    length: int,
    sequences: int,
    devices: int,
    activation_share: float,
    device_bytes: float,
) -> Envelope:
    """Memory per device to train a typical dense model with FSDP.

    Args:
        billions: parameters in billions, 1 to 700.
        length: tokens per sequence.
        sequences: sequences per micro-batch and device; the engine caches as many in all.
        devices: devices that shard the training state. The engine splits weights and cache over
            up to 8 of them, one key-value head each.
        activation_share: share of the activations that checkpointing keeps.
        device_bytes: memory of one device.

    Raises:
        UserError: if a number is out of range.
    """
    shape = typical_shape(billions)
    checks.whole(devices=devices)
    checks.share(activation_share=activation_share)
    checks.positive(device_bytes=device_bytes)
    whole = activation_bytes(
        layers=shape.layers, hidden=shape.hidden, length=length, sequences=sequences, width=2
    )
    per_token = kv_bytes_per_token(
        layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim, width=2
    )
    cache = cache_bytes(per_token, sequences=sequences, length=length)
    weights = inference_bytes(billions * 1e9, INFERENCE_WIDTH)
    state = training_bytes(billions * 1e9, STATES["bfloat16"]) / devices
    activations = whole * activation_share
    return Envelope(
        state=state,
        activations=activations,
        engine=(weights + cache) / min(devices, shape.kv_heads),
        kv_per_token=per_token,
        fits=state + activations <= device_bytes,
    )


@dataclass(frozen=True)
class PoolMemory:
    """Memory per device of three pools that work at the same time, in bytes.

    Attributes:
        state: trainer: weights, gradients and optimizer state.
        activations: trainer: activations.
        reference: weights of the reference model.
        engine_weights: weights of the engine.
        kv_cache: KV cache of the engine.
    """

    state: float
    activations: float
    reference: float
    engine_weights: float
    kv_cache: float

    @property
    def trainer(self) -> float:
        """Bytes on each training device."""
        return self.state + self.activations

    @property
    def rollout(self) -> float:
        """Bytes on each sampling device."""
        return self.engine_weights + self.kv_cache


def pool_memory(
    parameters: float,
    *,
    trainer_devices: int,
    reference_devices: int,
    rollout_devices: int,
    devices_per_engine: int,
    activations_per_device: float,
    cached_tokens: int,
    kv_per_token: int,
) -> PoolMemory:
    """Memory per device of a disaggregated run with a frozen reference.

    Args:
        parameters: number of parameters.
        trainer_devices: devices that shard the training state.
        reference_devices: devices that shard the reference.
        rollout_devices: devices of all engines, which share the cached tokens evenly.
        devices_per_engine: devices that shard the weights of one engine.
        activations_per_device: activations of a micro-batch after checkpointing, in bytes.
        cached_tokens: tokens in the KV caches of all engines together.
        kv_per_token: bytes of keys and values per token.

    Raises:
        UserError: if a number is out of range, or engines do not fill the devices evenly.
    """
    checks.whole(
        trainer_devices=trainer_devices,
        reference_devices=reference_devices,
        rollout_devices=rollout_devices,
        devices_per_engine=devices_per_engine,
        kv_per_token=kv_per_token,
    )
    checks.divides(rollout_devices=rollout_devices, devices_per_engine=devices_per_engine)
    checks.not_negative(activations_per_device=activations_per_device, cached_tokens=cached_tokens)
    weights = inference_bytes(parameters, INFERENCE_WIDTH)
    return PoolMemory(
        state=training_bytes(parameters, STATES["bfloat16"]) / trainer_devices,
        activations=activations_per_device,
        reference=weights / reference_devices,
        engine_weights=weights / devices_per_engine,
        kv_cache=cached_tokens * kv_per_token / rollout_devices,
    )
