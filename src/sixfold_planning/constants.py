"""The twelve fitted constants of the time model. Each belongs to a kind of hardware or engine.

`benchmarks/planning_constants.py` fits them to all rows of `tests/data/published_points.csv`
together. No constant belongs to a row, a model or a release. docs/planning.md explains each, and
says how well rows outside of the fit are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares are of the peak or bandwidth in the hardware table.

    Attributes:
        tuned: share of the peak that compiled pre-training engines (Megatron-LM, torchtitan with
            torch.compile) reach in matrix products, and FlashAttention in attention. The rest is
            memory-bound work between the products.
        eager: share of the peak of matrix products in engines that run layer by layer without a
            compiler (FSDP trainers, the trainers of RL frameworks, prefill).
        fp8: fp8 products reach this part of the share that bf16 products reach. The rest is
            scaling and casting.
        ring: share of the attention rate that is left if a ring of devices splits the sequence.
        bandwidth: share of the stated bandwidth that memory reads and collectives reach.
        decode_layer_s: seconds to launch the kernels of one layer of one decoding step. The GPU
            waits for it if batch and weights are small.
        layer_pass_s: seconds to launch one layer, once, in an eager trainer. Dense layers hide it
            behind the GPU's work. Expert layers add it: the host reads the token counts first.
        expert_loop_s: seconds per expert and pass in a trainer that runs experts one by one, on
            devices for which PyTorch has no grouped product.
        switch_s: seconds per step to switch devices between sampling and training (offload, wake).
        rl_micro_step_s: seconds of prime-rl's RL step outside of the model: loss, metrics, waits.
        publish_gb_s: 1e9 bytes/s at which prime-rl's trainer writes the weights for the sampler.
        sync: share of one network card that a gather, broadcast and load of weights reaches.
    """

    tuned: float
    eager: float
    fp8: float
    ring: float
    bandwidth: float
    decode_layer_s: float
    layer_pass_s: float
    expert_loop_s: float
    switch_s: float
    rl_micro_step_s: float
    publish_gb_s: float
    sync: float


CONSTANTS = Constants(
    tuned=0.476,
    eager=0.40,
    fp8=0.814,
    ring=0.646,
    bandwidth=0.67,
    decode_layer_s=287e-6,
    layer_pass_s=3.22e-3,
    expert_loop_s=0.592e-3,
    switch_s=28.7,
    rl_micro_step_s=0.845,
    publish_gb_s=4.04,
    sync=0.452,
)
