"""Sizes of public models, as in their config.json, and the parameters of their published weights.

The totals leave out buffers and layers for the prediction of several tokens (DeepSeek-V3), which
transformers does not load.
"""

from __future__ import annotations

from typing import Any


def _sizes(
    kind: str, vocabulary: int, hidden: int, inner: int, layers: int, heads: int, pairs: int,
    **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return dict(
        model_type=kind, vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=pairs,
        **others,
    )  # fmt: skip


PUBLIC: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (
        124_439_808,
        dict(model_type="gpt2", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12,
             n_head=12),
    ),
    "Llama-2-7B": (6_738_415_616, _sizes("llama", 32000, 4096, 11008, 32, 32, 32)),
    "Llama-3-70B": (70_553_706_496, _sizes("llama", 128256, 8192, 28672, 80, 64, 8)),
    "gemma-2-9b": (
        9_241_705_984, _sizes("gemma2", 256000, 3584, 14336, 42, 16, 8, head_dim=256)
    ),
    "gemma-3-1b": (
        999_885_952, _sizes("gemma3_text", 262144, 1152, 6912, 26, 4, 1, head_dim=256)
    ),
    "Phi-3-mini": (3_821_079_552, _sizes("phi3", 32064, 3072, 8192, 32, 32, 32)),
    "phi-2": (2_779_683_840, _sizes("phi", 51200, 2560, 10240, 32, 32, 32)),
    "pythia-6.9b": (6_857_302_016, _sizes("gpt_neox", 50432, 4096, 16384, 32, 32, 32)),
    "opt-6.7b": (
        6_658_473_984,
        _sizes("opt", 50272, 4096, 0, 32, 32, 32, ffn_dim=16384, max_position_embeddings=2048,
               word_embed_proj_dim=4096),
    ),
    "starcoder2-3b": (3_030_371_328, _sizes("starcoder2", 49152, 3072, 12288, 30, 24, 2)),
    "OLMo-2-7B": (7_298_617_344, _sizes("olmo2", 100352, 4096, 11008, 32, 32, 32)),
    "SmolLM3-3B": (3_075_098_624, _sizes("smollm3", 128256, 2048, 11008, 36, 16, 4)),
    "Mixtral-8x7B": (
        46_702_792_704,
        _sizes("mixtral", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8,
               num_experts_per_tok=2),
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        _sizes("qwen2_moe", 151936, 2048, 5632, 24, 16, 16, num_experts=60, num_experts_per_tok=4,
               moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        _sizes("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128,
               num_experts_per_tok=8, moe_intermediate_size=768),
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        _sizes("gpt_oss", 201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32,
               num_experts_per_tok=4),
    ),
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        _sizes("deepseek_v2", 102400, 2048, 10944, 27, 16, 16, q_lora_rank=None, kv_lora_rank=512,
               qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64,
               n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
               first_k_dense_replace=1),
    ),
    "DeepSeek-V3": (
        671_026_404_352,
        _sizes("deepseek_v3", 129280, 7168, 18432, 61, 128, 128, q_lora_rank=1536,
               kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
               n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
               moe_intermediate_size=2048, first_k_dense_replace=3),
    ),
}  # fmt: skip
