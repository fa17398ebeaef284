"""All named algorithms. To add one: add its file, and a line here. No torch."""

from __future__ import annotations

from .cispo import CISPO
from .dapo import DAPO
from .dr_grpo import DR_GRPO
from .gdpo import GDPO
from .gmpo import GMPO
from .grpo import GRPO
from .gspo import GSPO, GSPO_TOKEN
from .kimi import KIMI
from .lite_ppo import LITE_PPO
from .maxrl import MAXRL
from .method import Method
from .opd import OPD
from .opo import OPO
from .ppo import PPO
from .reinforce import REINFORCE
from .reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from .remax import REMAX
from .rloo import RLOO
from .sapo import SAPO

ZOO: dict[str, Method] = {
    row.name: row
    for row in (
        REINFORCE,
        PPO,
        GRPO,
        RLOO,
        DAPO,
        DR_GRPO,
        GSPO,
        GSPO_TOKEN,
        CISPO,
        REINFORCE_PP,
        REINFORCE_PP_BASELINE,
        SAPO,
        GMPO,
        OPO,
        MAXRL,
        KIMI,
        LITE_PPO,
        GDPO,
        REMAX,
        OPD,
    )
}
