"""Check that a module has the submodules and shapes that the fused decoder computes."""

from __future__ import annotations

from torch import nn

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend only on the position, not on the sequence length."""
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
LINEARS = {
    "self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}
OTHERS = {"self_attn": {"q_norm", "k_norm"}, "mlp": {"act_fn"}}


def has_decoder_parts(module: nn.Module) -> bool:
    """True if the module has exactly the submodules and shapes that the kernels compute."""
    body = module._modules.get("model")
    if body is None or set(body._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    embedding, rotary, layers = (
        body.get_submodule("embed_tokens"),
        body.get_submodule("rotary_emb"),
        list(body.get_submodule("layers").children()),
    )
    if (
        type(embedding) is not nn.Embedding
        or embedding.max_norm is not None
        or not _is_norm(body.get_submodule("norm"))
    ):
        return False
    config = vars(module).get("config")
    limited = config is not None and "max_position_embeddings" in vars(config)
    static = vars(rotary).get("rope_type") in STATIC_ROPE and "inv_freq" in rotary._buffers
    if not (limited and static and layers and all(_layer_has_parts(block) for block in layers)):
        return False
    shapes = [{name: tuple(p.shape) for name, p in block.named_parameters()} for block in layers]
    expected = _shapes(
        shapes[0], embedding.weight.shape[1], 2 * rotary.get_buffer("inv_freq").numel()
    )
    return all(layer == shapes[0] for layer in shapes) and expected.items() <= shapes[0].items()


def _layer_has_parts(block: nn.Module) -> bool:
    if set(block._modules) != PARTS:
        return False
    for room, names in LINEARS.items():
        found = block.get_submodule(room)._modules
        if not set(names) <= set(found) <= set(names) | OTHERS[room] or any(
            type(found[name]) is not nn.Linear for name in names
        ):
            return False
    heads = {"q_norm", "k_norm"} & set(block.get_submodule("self_attn")._modules)
    return len(heads) != 1 and all(
        _is_norm(m) for name, m in block.named_modules() if name.endswith("norm")
    )


def _is_norm(module: nn.Module) -> bool:
    return set(module._parameters) == {"weight"} and "variance_epsilon" in vars(module)


def _shapes(
    layer: dict[str, tuple[int, ...]], hidden: int, width: int
) -> dict[str, tuple[int, ...]]:
    """Expected weight shapes of a layer.

    Heads are complete and as wide as the rotary embedding. Each norm covers its entire input.

    Args:
        layer: actual shapes, from which the numbers of heads and the MLP width are read.
        hidden: width of the hidden states.
        width: width of the rotary embedding (D).
    """
    heads, kv_heads = (
        max(1, layer[f"self_attn.{name}.weight"][0] // width) for name in ("q_proj", "k_proj")
    )
    inner = layer["mlp.gate_proj.weight"][0]
    expected: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
    }
    expected |= {
        f"self_attn.{name}.weight": (n * width, hidden)
        for name, n in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    }
    expected |= {f"mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
    expected |= {
        "self_attn.o_proj.weight": (hidden, heads * width),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return expected | {
        name: (width,)
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        if name in layer
    }
