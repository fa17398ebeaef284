"""The proximal pass: log-probs of the samples under the trainer's weights before the first update.

It is used when the sampler's weights are older or its numerics differ. Ratios are then taken
against these log-probs, and the ratio of trainer to sampler is a separate importance weight
(arXiv:2505.24298). It costs one forward pass over the step's samples.
"""

from __future__ import annotations

from ..batch import Batch
from ..ranks import ALONE, Ranks
from .logprobs import Root, Scoring, score_tables


class Proximal:
    """Scores with the live weights, so it must run before the step's first update."""

    def __init__(
        self,
        root: Root,
        scoring: Scoring,
        max_tokens: int,
        share_prefix: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        self._root = root
        self._scoring = scoring
        self._max_tokens = max_tokens
        self._share_prefix = share_prefix
        self._ranks = ranks

    def score(self, batch: Batch) -> Batch:
        """The batch with prox_logp and entropy, [B, T] each, 0 where mask is False."""
        logp, entropy = score_tables(
            self._root, batch, self._scoring, self._max_tokens, self._share_prefix, self._ranks
        )
        return batch.with_(prox_logp=logp, entropy=entropy)
