"""What this package registers (pyproject.toml): rows of the core's registries."""

from __future__ import annotations

from dataclasses import replace

from sixfold.environment.registry import EpisodeRow, LibraryRow, RewardRow, SourceRow, ToolRow

_CAS = "sixfold_environments.maths.algebra:load_cas"
_SANDBOX = "sixfold_environments.sandbox.isolation:detect_isolation"


def _maths(spec: str) -> RewardRow:
    return RewardRow(spec, bounded=True, prepare=_CAS, answer="value")


def _code(spec: str) -> RewardRow:
    return RewardRow(spec, times_itself=True, runs_programs=True, prepare=_SANDBOX)


def _form(spec: str) -> RewardRow:
    return RewardRow(spec, verifier=False, bounded=True)


def _answer(spec: str) -> RewardRow:
    return RewardRow(spec, bounded=True, answer="list")


def _judge_row(spec: str, *, verifier: bool = False) -> RewardRow:
    row = RewardRow(spec, verifier, bounded=True, times_itself=True, needs="judge")
    return replace(row, answer="list") if verifier else row


def _gym(spec: str) -> RewardRow:
    return RewardRow(spec, source="reasoning_gym", prepare="sixfold_environments.gym:load_gym")


MATH = _maths("sixfold_environments.maths.answers:math_grade")
MATH_BOXED = _maths("sixfold_environments.maths.answers:math_boxed_grade")
MATH_STRICT = _maths("sixfold_environments.maths.answers:math_strict_grade")
CODE = _code("sixfold_environments.code.reward:code_reward")
CODE_FRACTION = _code("sixfold_environments.code.reward:code_fraction_reward")
SHORT_ANSWER = _answer("sixfold_environments.text.short_answers:short_answer")
WEB_ANSWER = _answer("sixfold_environments.text.short_answers:web_answer")
TOOL_CALLS = _answer("sixfold_environments.text.tool_calls:tool_calls")
THINK_FORMAT = _form("sixfold_environments.text.formats:think_format")
THINK_ANSWER_FORMAT = _form("sixfold_environments.text.formats:think_answer_format")
JSON_FORMAT = _form("sixfold_environments.text.formats:json_format")
WORD_COUNT = _form("sixfold_environments.text.words:word_count")
NO_REPETITION = _form("sixfold_environments.text.words:no_repetition")
LANGUAGE = _form("sixfold_environments.text.language:language")
JUDGE_RUBRIC = _judge_row("sixfold_environments.judge.rubric:rubric_reward")
JUDGE_REFERENCE = _judge_row("sixfold_environments.judge.reference:reference_reward", verifier=True)
JUDGE_PAIRWISE = _judge_row("sixfold_environments.judge.pairwise:pairwise_reward")
JUDGE_CONSTITUTION = _judge_row("sixfold_environments.judge.constitution:constitution_reward")
REASONING_GYM = _gym("sixfold_environments.gym:gym_grade")
REASONING_GYM_SOLVED = _gym("sixfold_environments.gym:gym_solved_grade")

SEARCH_AGENT = EpisodeRow("sixfold_environments.search.agent:SearchAgent")
SQL_AGENT = EpisodeRow("sixfold_environments.sql.agent:SqlAgent")
WEB = EpisodeRow("sixfold_environments.web.user_site:Web", copyable=False)
WEB_SHOP = EpisodeRow("sixfold_environments.web.episode:WebShop", copyable=False)

GYMNASIUM = LibraryRow(
    "sixfold_environments.adapters.gymnasium_env:gymnasium_episode",
    "sixfold_environments.sources:gymnasium",
    step_rewards=True,
)
OPENENV = LibraryRow(
    "sixfold_environments.adapters.openenv_env:openenv_episode",
    "sixfold_environments.sources:openenv",
    step_rewards=True,
)
TRL = LibraryRow("sixfold_environments.adapters.trl_env:trl_episode", takes_tools=True)
VERIFIERS = LibraryRow(
    "sixfold_environments.adapters.verifiers_env:verifiers_episode",
    "sixfold_environments.sources:verifiers",
)

PYTHON = ToolRow("sixfold_environments.code.python_tool:python", runs_programs=True)
SEARCH = ToolRow("sixfold_environments.search.tools:corpus_tools", file="environment.search.corpus")
SQL = ToolRow("sixfold_environments.sql.tool:sql_tools", file="environment.sql.database")

CODE_FUNCTIONS = SourceRow("sixfold_environments.sources:code_functions")
GYM_TASKS = SourceRow("sixfold_environments.sources:reasoning_gym")
FACTS = SourceRow("sixfold_environments.sources:search_agent")
BOOKSHOPS = SourceRow("sixfold_environments.sources:sql_agent")
SHOPS = SourceRow("sixfold_environments.sources:web_shop")
WORD_PROBLEMS = SourceRow("sixfold_environments.sources:word_problems")
