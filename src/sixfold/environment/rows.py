"""Rewards, environments, tools and sources of the core, as it registers them (pyproject.toml)."""

from __future__ import annotations

from .registry import EpisodeRow, RewardRow, SourceRow, ToolRow

ARITHMETIC = RewardRow(
    "sixfold.environment.arithmetic:arithmetic_grade", bounded=True, answer="value"
)
WORKED_SUM = RewardRow(
    "sixfold.environment.arithmetic:worked_sum_grade", bounded=True, answer="value"
)
DIVERSITY = RewardRow("sixfold.environment.group_form:diversity", verifier=False, bounded=True)

CALCULATOR = EpisodeRow("sixfold.environment.calculator:Calculator")
TOOLS = EpisodeRow("sixfold.environment.tools.episode:ToolEpisode")

CALCULATOR_TOOL = ToolRow("sixfold.environment.tools.arithmetic:calculator")

SUMS = SourceRow("sixfold.data.generated:sums")
CALLS = SourceRow("sixfold.data.generated:calls")
