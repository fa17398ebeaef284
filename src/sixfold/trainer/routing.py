"""Routing of a mixture of experts in training: balance loss, statistics, replay.

Without a penalty, routers may send all tokens to a few experts. The balance loss of the Switch
Transformer (arXiv:2101.03961, equations 4 to 6) for one layer with E experts is

    E · Σ_e f_e P_e      f_e: tokens that chose expert e / tokens
                         P_e: mean router probability of expert e

Its mean over the layers, times `moe.balance_loss`, is added to the loss. With k experts per token
the mean is k if all experts are used equally. f_e has no gradient.

Tokens are those of all trajectories of the update: a token of a prompt that K trajectories share
counts K times. f_e is counted over the whole update before its first micro-batch is trained, so
the gradient does not depend on how rows are split and packed.

A replay computes every token with the experts that computed it when it was sampled
(arXiv:2510.11370). Their weights come from the current router logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batch import send
from ..errors import UserError
from ..model.experts import OWN, Routers, RoutingRecord, find_routers
from ..ranks import ALONE, Ranks
from ..recipe.schema import MoeConfig
from .packing import PackedRow


class Routed(NamedTuple):
    """Report of the routers of L layers for one micro-batch.

    Attributes:
        counts: [L, E] tokens per expert.
        tokens: scalar, number of tokens.
        balance: balance loss, without gradient. None if it is off.
        penalty: scalar to add to the loss, with gradient. None if the balance loss is off.
        drifted: [3] counts: tokens whose routers choose other experts than at sampling in at least
            one layer; pairs of token and layer with other experts; tokens compared. None if the
            experts at sampling are unknown.
    """

    counts: Tensor
    tokens: Tensor
    balance: Tensor | None = None
    penalty: Tensor | None = None
    drifted: Tensor | None = None


class Routing:
    """Watches the routers of the trained model, and computes the balance loss.

    Args:
        coefficient: weight of the balance loss; 0 for none.
        replay: whether tokens are computed by the experts that computed them at sampling.

    Attributes:
        over_positions: adds a tensor over the ranks that divide the positions of a row.
    """

    def __init__(self, routers: Routers, coefficient: float = 0.0, *, replay: bool = False) -> None:
        self.routers = routers
        self.coefficient = coefficient
        self.replay = replay
        self.over_positions: Callable[[Tensor], Tensor] = lambda counts: counts
        self._update: tuple[Tensor, Tensor] | None = None

    def watch(self, model: nn.Module, row: PackedRow) -> AbstractContextManager[RoutingRecord]:
        """Context for the forward pass of one packed row. It records and, if asked, replays."""
        return self.routers.watch(model, row.experts if self.replay else None)

    def prepare(
        self,
        rows: Sequence[Callable[[], PackedRow]],
        run: Callable[[PackedRow], Routed | None],
        ranks: Ranks = ALONE,
    ) -> None:
        """Count the tokens of each expert over an update, if the balance loss needs it.

        An update with one micro-batch is counted in its own forward pass. Otherwise the body of the
        model runs once more on every micro-batch, without gradients.

        Args:
            rows: functions that make the micro-batches of this rank.
            run: forward pass of one micro-batch, which returns the report of the routers.
        """
        self._update = None
        if self.coefficient == 0 or (len(rows) == 1 and ranks.size == 1):
            return
        with torch.no_grad():
            found = [routed for row in rows if (routed := run(row())) is not None]
        counts, tokens = _sum([r.counts for r in found]), _sum([r.tokens for r in found])
        self._update = ranks.sum(counts), ranks.sum(tokens)

    def result(self, record: RoutingRecord, row: PackedRow) -> Routed:
        """Report of the routers from the record of one forward pass."""
        weight = send(torch.from_numpy(row.copies.astype(np.float32)), row.tokens.device)
        counts = self.over_positions(expert_counts(record.choices(), weight, self.routers.experts))
        tokens, drifted = self.over_positions(weight.sum()), None
        if row.experts is not None:
            drifted = self.over_positions(drift(record.own_choices(), row.experts))
        if self.coefficient == 0:
            return Routed(counts, tokens, drifted=drifted)
        all_counts, all_tokens = self._update or (counts, tokens)
        logits = [record.logits[i] for i in sorted(record.logits)]
        loss = balance_loss(
            [router_probabilities(x, self.routers.sigmoid) for x in logits],
            weight / all_tokens,
            all_counts / all_tokens,
        )
        whole = self.over_positions(loss.detach())
        return Routed(counts, tokens, whole, loss * self.coefficient, drifted)


def make_routing(model: PreTrainedModel, config: MoeConfig) -> Routing | None:
    """Make the `Routing` of a model with experts. None for a model whose routers cannot be read.

    Raises:
        UserError: if a setting of `moe` cannot work with the model.
    """
    routers = find_routers(model)
    if routers is None:
        settings = [f"moe.balance_loss = {config.balance_loss:g}"] * (config.balance_loss > 0)
        settings += [f"moe.routing = '{config.routing}'"] * (config.routing != "free")
        if settings:
            raise UserError(
                f"{' and '.join(settings)}: {type(model).__name__} has no expert layers whose"
                " routers can be read. Remove the setting"
            )
        return None
    if config.routing == "replay" and not routers.replays:
        raise UserError(
            f"moe.routing = 'replay': the routers of {type(model).__name__} do not choose experts"
            " by one top-k, so their choices cannot be replayed. Use 'measure' or 'free'"
        )
    return Routing(routers, config.balance_loss, replay=config.routing == "replay")


def router_probabilities(logits: Tensor, sigmoid: bool) -> Tensor:
    """Probabilities [N, E] of the experts, in float32.

    Args:
        logits: [N, E].
        sigmoid: True: normalised sigmoids of the logits, as in the balance loss of DeepSeek-V3
            (arXiv:2412.19437, equations 17 to 20). False: the softmax.
    """
    if not sigmoid:
        return logits.float().softmax(-1)
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def balance_loss(probabilities: Sequence[Tensor], weight: Tensor, load: Tensor) -> Tensor:
    """Balance loss: mean over layers of E · Σ_e load_e Σ_n weight_n p_ne.

    Args:
        probabilities: [N, E] router probabilities of each layer.
        weight: [N] share of each token in all tokens of the update.
        load: [L, E] share of all tokens that chose each expert. Each row sums to k.

    Returns:
        Scalar with gradient. The loss of an update is the sum over its micro-batches.
    """
    layers, experts = load.shape
    means = torch.stack([weight @ p for p in probabilities])
    return (load * means).sum() * (experts / layers)


def expert_counts(choices: Tensor, weight: Tensor, experts: int) -> Tensor:
    """Tokens per expert, [L, E] float32.

    Args:
        choices: [N, L, k] experts of each token.
        weight: [N] number of times that each token counts.
    """
    count, layers, top_k = choices.shape
    flat = choices.transpose(0, 1).reshape(layers, -1)
    each = weight[:, None].expand(count, top_k).reshape(1, -1).expand(layers, -1)
    return torch.zeros(layers, experts, device=choices.device).scatter_add_(1, flat, each)


def drift(own: Tensor, sampled: Tensor) -> Tensor:
    """Compute `Routed.drifted`, [3]. Tokens without a record (OWN) do not count.

    Args:
        own: [N, L, k] experts that the routers choose now.
        sampled: [N, L, k] experts at sampling.
    """
    known = sampled[:, 0, 0] != OWN
    differs = (own.sort(-1)[0] != sampled.long().sort(-1)[0]).any(-1) & known[:, None]
    return torch.stack([differs.any(-1).sum(), differs.sum(), known.sum()])


def router_metrics(routed: Sequence[Routed]) -> dict[str, Tensor]:
    """Metrics of an update from the reports of its micro-batches, as scalars.

    Empty for a model without experts.
    """
    if not routed:
        return {}
    counts = _sum([r.counts for r in routed])
    share = counts / counts.sum(-1, keepdim=True).clamp_min(1.0)
    experts = counts.shape[1]
    entropy = -torch.special.xlogy(share, share).sum(-1) / np.log(max(experts, 2))
    found = {
        "moe/max_load": (share.amax(-1) * experts).mean(),
        "moe/load_entropy_frac": entropy.mean(),
        "moe/dead_frac": (counts == 0).float().mean(),
    }
    if balance := [r.balance for r in routed if r.balance is not None]:
        found["moe/balance_loss"] = _sum(balance)
    if drifted := [r.drifted for r in routed if r.drifted is not None]:
        tokens, choices, all_tokens = _sum(drifted).double().unbind()
        found["moe/drift_frac"] = tokens / all_tokens.clamp_min(1)
        found["moe/drift_layer_frac"] = choices / (all_tokens * len(counts)).clamp_min(1)
    return found


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)
