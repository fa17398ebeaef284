"""A causal LM in two halves: the body (tokens -> hidden states) and the head (hidden states -> logits).

The split is what lets the trainer score a chunk of positions at a time, and the engine only the last one, without [B, T, V] ever existing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UserError
from .attention import Layout


def hidden_states(model: PreTrainedModel, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Body of the model on one row of N tokens laid out by `layout`: tokens, positions [N] -> [N, hidden]."""
    output = model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
    return output.last_hidden_state[0]


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Head of the model: hidden [N, hidden] -> float32 logits [N, V], with the scaling or soft cap that the architecture applies after it."""
    head = model.get_output_embeddings()
    logits = head(hidden).float()
    settings = model.config.to_dict()
    if settings.get("logits_scaling") is not None:  # Granite divides
        logits = logits / settings["logits_scaling"]
    if settings.get("logit_scale") is not None:  # Cohere multiplies
        logits = logits * settings["logit_scale"]
    cap = settings.get("final_logit_softcapping")  # Gemma 2 and 3
    return logits if cap is None else cap * torch.tanh(logits / cap)


class _FullRow:
    """One ordinary causal row: what the plain forward computes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: object) -> Tensor:
        from .attention import causal_attention

        return causal_attention(q, k, v, kernel).transpose(1, 2).contiguous()  # type: ignore[arg-type]


@torch.no_grad()
def check_split(model: PreTrainedModel, tolerance: float = 1e-3) -> None:
    """Refuse a model whose own forward is not head(body(x)): its log-probs would be silently wrong.

    Raises UserError with the size of the difference.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(1, 9, device=device) % model.config.get_text_config().vocab_size
    positions = torch.arange(8, device=device)
    ours = head_logits(model, hidden_states(model, tokens, positions, _FullRow()))
    theirs = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    difference = float((ours - theirs).abs().max())
    scale = float(theirs.abs().max()) + 1.0
    if not difference <= tolerance * scale:
        kind = type(model).__name__
        raise UserError(f"{kind} is not supported: its logits differ by {difference:.2g} from head(body(x)); a causal LM with a plain head is needed")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that receive gradients, by name; tied weights once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
