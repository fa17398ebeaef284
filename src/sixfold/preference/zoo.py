"""The preference losses: each row is its predecessor with some choices changed. No torch.

Formulas use h = log pi / pi_ref of the better (w) and worse (l) completion, d = h_w - h_l, |y| for
a completion's tokens, and logsig for the logarithm of the sigmoid.
"""

from __future__ import annotations

from dataclasses import replace

from .loss import MARGIN, SCORES, PreferenceLoss, Settings

_SMOOTHED = (*SCORES, "label_smoothing")

DPO = PreferenceLoss(
    name="dpo",
    patches="",
    paper="arXiv:2305.18290 eq. 7",
    formula="-logsig(beta d)",
    change="a reward model and PPO become one logistic loss: beta h is the reward",
    use="the default: clean pairs, and a reference that could have written them",
    link="logistic",
    defaults=Settings(divergence_alpha=0.5),
    peers="TRL sigmoid; OpenRLHF, open-instruct, Axolotl dpo; LlamaFactory, NeMo-RL sigmoid",
)
CDPO = replace(
    DPO,
    name="cdpo",
    patches="dpo",
    paper="ericmitchell.ai/cdpo.pdf eq. 3",
    formula="-(1 - e) logsig(beta d) - e logsig(-beta d)",
    change="e, the share of wrong labels (label_smoothing): the margin has a finite optimum",
    use="labels that are often wrong",
    reads=_SMOOTHED,
    defaults=Settings(label_smoothing=0.1),
    peers="OpenRLHF label_smoothing; TRL: a weighted sum of sigmoid and robust",
)
ROBUST = replace(
    CDPO,
    name="robust",
    patches="cdpo",
    paper="arXiv:2403.00409 eq. 13",
    formula="[-(1 - e) logsig(beta d) + e logsig(-beta d)] / (1 - 2 e)",
    change="the loss is that of clean labels in expectation",
    use="labels that are wrong with a known probability",
    link="robust",
    peers="TRL robust",
)
HINGE = replace(
    DPO,
    name="hinge",
    patches="dpo",
    paper="arXiv:2305.10425 (SLiC), arXiv:2309.06657 (RSO)",
    formula="max(0, 1 - beta d)",
    change="a hinge: pairs with a margin above 1 / beta are not trained any more",
    use="to stop at a margin",
    link="hinge",
    defaults=Settings(beta=0.05),
    peers="TRL, LlamaFactory hinge",
)
IPO = replace(
    DPO,
    name="ipo",
    patches="dpo",
    paper="arXiv:2310.12036 eq. 17",
    formula="(h_w / |w| - h_l / |l| - 1 / (2 beta))^2",
    change="a square: the margin has a target, and a pair that exceeds it is pulled back",
    use="nearly deterministic labels, on which DPO's margin grows without end",
    link="square",
    defaults=Settings(per_token=True),
    peers="TRL ipo (per token, as the authors confirm); LlamaFactory, Axolotl ipo",
)
IPO_SUM = replace(
    IPO,
    name="ipo_sum",
    patches="ipo",
    formula="(d - 1 / (2 beta))^2",
    change="sums over tokens, as printed: the loss grows with the square of the length",
    use="to compare with frameworks that sum",
    defaults=Settings(),
    peers="OpenRLHF ipo; torchtune's former ipo",
)
DPO_NORM = replace(
    DPO,
    name="dpo_norm",
    patches="dpo",
    paper="arXiv:2411.15124 eq. 6 (Tulu 3)",
    formula="-logsig(beta (h_w / |w| - h_l / |l|))",
    change="log-ratios per token: a long completion does not outweigh a short one",
    use="pairs whose lengths differ",
    defaults=Settings(beta=5.0, per_token=True),
    peers="TRL sigmoid_norm; open-instruct dpo_norm",
)
LD_DPO = replace(
    DPO,
    name="ld_dpo",
    patches="dpo",
    paper="arXiv:2409.06411 eq. 9",
    formula="-logsig(beta d), with log-probs head + a tail; tail: after min(|w|, |l|) tokens",
    change="a (tail_weight): what the longer completion has more counts less",
    use="better completions that are better because they are longer",
    defaults=Settings(tail_weight=0.5),
    peers="TRL ld_alpha",
)
WPO = replace(
    DPO,
    name="wpo",
    patches="dpo",
    paper="arXiv:2406.11827 eq. 2",
    formula="-exp(log pi_w / |w| + log pi_l / |l|) logsig(beta d); the weight has no gradient",
    change="a weight: pairs that the policy could have written count most",
    use="completions of other models",
    defaults=Settings(policy_weights=True),
    peers="open-instruct wpo; TRL use_weighting (which also divides by the sum of squares of p)",
)
POSITIVE = replace(
    DPO,
    name="dpop",
    patches="dpo",
    paper="arXiv:2402.13228 eq. 3 (DPO-positive, Smaug)",
    formula="-logsig(beta (d - penalty max(0, -h_w)))",
    change="a penalty where the better completion falls below the reference",
    use="pairs that differ in a few tokens: DPO makes both less likely",
    link="positive",
    reads=(*SCORES, "penalty"),
    defaults=Settings(penalty=50.0),
    peers="none",
)
DPO_SHIFT = replace(
    DPO,
    name="dpo_shift",
    patches="dpo",
    paper="arXiv:2502.07599 eq. 4",
    formula="-logsig(beta (h_w - f h_l))",
    change="f below 1 (shift) trades margin for the probability of the better completion",
    use="a better completion that loses probability (likelihood displacement)",
    defaults=Settings(shift=0.95),
    peers="none",
)
BETA_DPO = replace(
    DPO,
    name="beta_dpo",
    patches="dpo",
    paper="arXiv:2407.08639 eq. 8 to 10",
    formula="-logsig(beta' d), beta' = beta (1 + 0.6 (mean beta d - M0)), M0 its running mean",
    change="beta follows the step's margin; the fifth of the pairs furthest from M0 is left out",
    use="pairs of uneven quality; likelihood displacement",
    reads=(*SCORES, "label_smoothing"),
    defaults=Settings(kept=0.8, adaptation=0.6, momentum=0.9),
    statistics="adaptive beta",
    peers="none",
)
SQUARED_PO = replace(
    DPO,
    name="squared_po",
    patches="dpo",
    paper="arXiv:2602.06788",
    formula="-logsig(beta (h_w exp(-h_w) - h_l exp(-h_l)))",
    change="f(t) = log(t)^2 / 2 replaces the KL: its minimum is at t = 1, not at 1 / e",
    use="likelihood displacement over many epochs",
    defaults=Settings(divergence="squared"),
    peers="none",
)
EXO = replace(
    DPO,
    name="exo",
    patches="dpo",
    paper="arXiv:2402.00856 eq. 16",
    formula="q log(q / (1 - e)) + (1 - q) log((1 - q) / e), q = sigmoid(beta d)",
    change="the reverse KL between policy and labels, so it seeks modes",
    use="a policy that should commit to the best completions",
    link="exo",
    reads=_SMOOTHED,
    defaults=Settings(label_smoothing=1e-3),
    peers="TRL exo_pair",
)
DISCOPOP = replace(
    DPO,
    name="discopop",
    patches="dpo",
    paper="arXiv:2406.08414 eq. 5",
    formula="(1 - a) log(1 + exp(-z)) + a exp(-z), a = sigmoid(z / 0.05), z = beta d",
    change="a blend of logistic and exponential loss that a search over losses found",
    use="to compare",
    link="discopop",
    defaults=Settings(modulation=0.05),
    peers="TRL discopop",
)
NCA = replace(
    DPO,
    name="nca",
    patches="dpo",
    paper="arXiv:2402.05369 eq. 11",
    formula="-logsig(beta h_w) - logsig(-beta h_w) / 2 - logsig(-beta h_l) / 2",
    change="each completion is compared with the reference, so the better one cannot fall far",
    use="absolute rewards beside the order",
    link="nca",
    reads=MARGIN,
    peers="TRL nca_pair",
)
BCO_PAIR = replace(
    NCA,
    name="bco_pair",
    patches="nca",
    paper="arXiv:2404.04656",
    formula="-logsig(beta h_w) - logsig(-beta h_l)",
    change="a classifier of the completions by the sign of h, without noise terms",
    use="in a mixture (MPO: 0.8 dpo, 0.2 bco_pair, 1 sft)",
    link="bco_pair",
    peers="TRL bco_pair",
)
SPPO = replace(
    BCO_PAIR,
    name="sppo",
    patches="bco_pair",
    paper="arXiv:2405.00675 eq. 4.7",
    formula="(h_w - 1 / (2 beta))^2 + (h_l + 1 / (2 beta))^2",
    change="squares: each completion has a target of its own",
    use="rounds of self-play with hard labels",
    link="sppo",
    peers="TRL sppo_hard",
)
APO_ZERO = replace(
    BCO_PAIR,
    name="apo_zero",
    patches="bco_pair",
    paper="arXiv:2408.06266 eq. 7",
    formula="sigmoid(-beta h_w) + sigmoid(beta h_l)",
    change="bounded: the better completion rises, the worse one falls, both saturate",
    use="better completions that are better than the policy's own",
    link="apo_zero",
    peers="TRL apo_zero",
)
APO_DOWN = replace(
    APO_ZERO,
    name="apo_down",
    patches="apo_zero",
    paper="arXiv:2408.06266 eq. 8",
    formula="sigmoid(beta h_w) + sigmoid(-beta d)",
    change="both completions fall, the worse one more",
    use="better completions that are worse than the policy's own",
    link="apo_down",
    peers="TRL apo_down",
)
AOT = replace(
    DPO,
    name="aot",
    patches="dpo",
    paper="arXiv:2406.05882 (AOT, paired)",
    formula="-logsig(beta (u_(k) - v_(k))), k-th smallest log pi_w - log pi_l, and the reference's",
    change="whole distributions of the step are compared, rank by rank",
    use="large steps, where a distribution has a meaning",
    link="aot",
    reads=(*MARGIN, "label_smoothing"),
    statistics="sorted pairs",
    peers="TRL aot (which sorts inside a micro-batch)",
)
AOT_UNPAIRED = replace(
    AOT,
    name="aot_unpaired",
    patches="aot",
    paper="arXiv:2406.05882 (AOT, unpaired)",
    formula="-logsig(beta (h_w(k) - h_l(k))), k-th smallest of all better, and of all worse ones",
    change="the better completions of the step are compared with its worse ones, not by pair",
    use="pairs of different prompts that have little in common",
    link="aot_unpaired",
    statistics="sorted sides",
    peers="TRL aot_unpaired (which sorts inside a micro-batch)",
)
CPO = replace(
    DPO,
    name="cpo",
    patches="dpo",
    paper="arXiv:2401.08417 eq. 5",
    formula="-logsig(beta (log pi_w - log pi_l)) - log pi_w per token",
    change="a uniform reference, and the cross-entropy of the better completion holds the policy",
    use="no memory for a reference",
    reads=(*MARGIN, "shift", "label_smoothing"),
    defaults=Settings(sft_weight=1.0),
    needs_reference=False,
    peers="TRL CPOConfig sigmoid",
)
SIMPO = replace(
    CPO,
    name="simpo",
    patches="cpo",
    paper="arXiv:2405.14734 eq. 6",
    formula="-logsig(beta (log pi_w / |w| - log pi_l / |l|) - gamma)",
    change="log-probs per token, a margin gamma to exceed (target_margin), and no cross-entropy",
    use="no memory for a reference, and answers that should not grow",
    reads=(*MARGIN, "shift", "label_smoothing", "target_margin"),
    defaults=Settings(beta=2.0, target_margin=1.0, per_token=True),
    peers="TRL CPOConfig simpo with cpo_alpha 0; open-instruct, LlamaFactory, Axolotl simpo",
)
ORPO = replace(
    CPO,
    name="orpo",
    patches="cpo",
    paper="arXiv:2403.07691 eq. 6 and 7",
    formula="-log pi_w per token - beta logsig(log odds_w - log odds_l); odds p / (1 - p)",
    change="odds in place of probabilities: the penalty of the worse completion stays weak",
    use="SFT and preferences in one stage, from a base model",
    link="odds_ratio",
    reads=MARGIN,
    defaults=Settings(sft_weight=1.0, per_token=True),
    peers="TRL ORPOConfig (its cross-entropy includes the prompt); LlamaFactory, Axolotl orpo",
)
SFT = replace(
    CPO,
    name="sft",
    patches="cpo",
    paper="-",
    formula="-log pi_w per token of the step",
    change="only the cross-entropy is left",
    use="as a term of a mixture (RPO: 1 dpo, 0.005 sft)",
    link="none",
    reads=("sft_weight",),
    defaults=Settings(sft_weight=1.0),
    peers="TRL sft; NeMo-RL sft_loss_weight; LlamaFactory pref_ftx",
)
KTO = replace(
    DPO,
    name="kto",
    patches="dpo",
    paper="arXiv:2402.01306 eq. 8",
    formula="liked: w sigmoid(-beta (h - z0)); disliked: w sigmoid(beta (h - z0)); z0: the KL",
    change="single completions with a label: gains and losses against a reference point saturate",
    use="thumbs up and down, or very unequal numbers of them",
    link="kto",
    reads=("beta", "liked_weight", "disliked_weight"),
    defaults=Settings(liked_weight=1.0, disliked_weight=1.0),
    unpaired=True,
    statistics="reference point",
    peers="TRL KTOConfig kto (z0 from a micro-batch); LlamaFactory, Axolotl kto",
)
BCO = replace(
    KTO,
    name="bco",
    patches="kto",
    paper="arXiv:2404.04656 eq. 12",
    formula="liked: -logsig(beta h - delta); disliked: -logsig(delta - beta h)",
    change="a classifier; delta is the running mean of the rewards of both labels",
    use="as KTO, where its saturation learns too slowly",
    link="bco",
    statistics="reward shift",
    peers="LlamaFactory bco (pref_bco_weight)",
)
APO_ZERO_UNPAIRED = replace(
    KTO,
    name="apo_zero_unpaired",
    patches="kto",
    paper="arXiv:2408.06266",
    formula="liked: w sigmoid(-beta h); disliked: w sigmoid(beta h)",
    change="z0 = 0: nothing of the whole step is needed",
    use="as KTO, from a policy that is still near its reference",
    link="apo_zero_unpaired",
    statistics="",
    peers="TRL KTOConfig apo_zero_unpaired",
)
OUTCOME = replace(
    BCO,
    name="outcome",
    patches="bco",
    paper="arXiv:2412.01981 (cross-entropy), arXiv:2502.01456",
    formula="liked: -logsig(beta h); disliked: -logsig(-beta h)",
    change="delta = 0: sigmoid(beta h) becomes the probability that the completion is liked",
    use="an implicit process reward model: the log-ratio of graded samples to their policy",
    link="outcome",
    defaults=Settings(beta=0.05),
    statistics="",
    peers="PRIME ce",
)

LOSSES: dict[str, PreferenceLoss] = {
    row.name: row
    for row in (
        *(DPO, CDPO, ROBUST, HINGE, IPO, IPO_SUM, DPO_NORM, LD_DPO, WPO),
        *(POSITIVE, DPO_SHIFT, BETA_DPO, SQUARED_PO),
        *(EXO, DISCOPOP, NCA, BCO_PAIR, SPPO, APO_ZERO, APO_DOWN, AOT, AOT_UNPAIRED),
        *(CPO, SIMPO, ORPO, SFT),
        *(KTO, BCO, APO_ZERO_UNPAIRED, OUTCOME),
    )
}
