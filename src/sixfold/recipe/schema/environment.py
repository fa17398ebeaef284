"""Settings of the environment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Real, Section, knob
from .judge import JudgeConfig
from .prm import ProcessScoringConfig
from .reward_model import RewardScoringConfig


class SandboxConfig(Section):
    """Isolation of programs that the model has written."""

    isolation: Literal["namespaces", "limits"] = knob(
        "namespaces",
        "weakest isolation that is allowed; a machine that gives less refuses to start; limits:"
        " resource limits only, which do not stop hostile code",
    )


class AgentConfig(Section):
    """A program that plays the episodes through an OpenAI-compatible endpoint."""

    command: str = knob(
        "",
        "program that plays the episodes: a command line that is started once per episode, with"
        " OPENAI_BASE_URL and SIXFOLD_TASK in its environment, or a function of a task and a base"
        " URL: path.py:function or module:function (empty: no agent)",
    )
    concurrency: int = knob(8, "maximum number of agents that run at the same time", ge=1, le=1024)
    timeout_s: Real = knob(
        60.0,
        "time limit for an agent's own work in one episode, in seconds; waiting for the policy does"
        " not count; at the limit, the agent and all its child processes are ended",
        gt=0,
    )
    answers: bool = knob(
        True,
        "SIXFOLD_TASK has the task's answer and columns; set it to false for a program that"
        " executes the policy's replies",
    )

    @property
    def is_function(self) -> bool:
        """True if `command` names a Python function."""
        source, colon, name = self.command.rpartition(":")
        return bool(colon and name.isidentifier() and source and not source.split()[1:])


class ToolsConfig(Section):
    """Tools that the policy may call, in episodes with tools."""

    functions: tuple[str, ...] = knob(
        (),
        "tools of every episode: calculator, python (in the sandbox), search (needs"
        " environment.search.corpus), sql (needs environment.sql.database), path.py:function or"
        " module:function; an episode's own class may have more",
    )
    mcp: tuple[Annotated[str, Field(min_length=1)], ...] = knob(
        (),
        "MCP servers whose tools every episode has: a command line that starts one, or its URL",
    )
    record: str = knob("", "folder in which the results of tools are recorded (empty: none)")
    replay: str = knob(
        "", "folder with recorded results, which stand in for running the tools (empty: run them)"
    )
    timeout_s: Real = knob(
        0.0,
        "time limit for a call of a tool without its own limit, in seconds (0: 80% of"
        " environment.timeout_s)",
        ge=0,
    )
    max_calls: int = knob(
        16,
        "maximum number of calls in one reply; further calls are not run and get an error",
        ge=1,
        le=1024,
    )
    max_result: int = knob(8192, "maximum number of characters of a result; the rest is cut", ge=1)
    max_running: int = knob(
        64,
        "maximum number of calls that run at the same time, over all episodes",
        ge=1,
        le=4096,
    )


class SearchConfig(Section):
    """Corpus of the built-in tool `search`."""

    corpus: str = knob(
        "", "corpus of the tool search: a .jsonl file of documents with id, text and maybe title"
    )


class SqlConfig(Section):
    """Database of the built-in tool `sql`."""

    database: str = knob("", "SQLite file that the tool sql reads; it is never changed")


class WebConfig(Section):
    """Environments in a browser: the built-in shop, and sites of the user."""

    browser: Literal["html", "chromium"] = knob(
        "html",
        "html: the built-in browser without scripts, which is fast; chromium: Chromium, driven by"
        " Playwright",
    )
    page_characters: int = knob(
        4000,
        "maximum number of characters of a page in one observation; the tool more shows the rest",
        ge=100,
        le=8000,
    )
    answer_s: Real = knob(3.0, "time limit for an answer of the site, in seconds", gt=0, le=60)
    site: str = knob(
        "",
        "your own site, for environment.episode = web: module:app or path.py:app (a WSGI"
        " application, or a function that makes one for a task), or http://127.0.0.1:PORT",
    )
    goals: tuple[str, ...] = knob(
        (),
        "functions as path.py:function that reward the state of your site; a task's column goal"
        " names one",
    )


class EnvironmentConfig(Section):
    """Checks of answers, and their limits."""

    episode: str = knob(
        "",
        "environment of several turns: calculator, search_agent, sql_agent, tools, web, web_shop,"
        " path.py:Class, module:Class, or one of another library, e.g. gymnasium:ID (sixfold env"
        " list) (empty: one reply per task)",
    )
    rewards: tuple[str, ...] = knob(
        ("arithmetic",),
        "reward functions, summed; an environment of several turns may give the reward itself:"
        " arithmetic, worked_sum, code, code_fraction, diversity, math, math_boxed, math_strict,"
        " short_answer, web_answer, tool_calls,"
        " think_format, think_answer_format, json_format, word_count, no_repetition, language,"
        " reasoning_gym, reasoning_gym_solved,"
        " judge_rubric, judge_reference, judge_pairwise, judge_constitution,"
        " reward_model:FOLDER, stage:NAME (a reward model; several with commas are an ensemble),"
        " prm:FOLDER, prm:stage:NAME (a process reward model),"
        " path.py:function or module:function",
    )
    weights: tuple[Real, ...] = knob((), "weight of each reward (empty: 1 for each)")
    timeout_s: Real = knob(
        5.0,
        "time limit for one check, or for one step of an environment of several turns, in seconds;"
        " a check or step that exceeds it is stopped and recorded as an error",
        gt=0,
    )
    error_budget: Real = knob(
        0.1, "share of checks per step that may fail before the run stops", ge=0, le=1
    )
    workers: int = knob(1, "number of processes that check answers", ge=1, le=1024)
    preflight: int = knob(
        50,
        "number of rollouts before the first step, to report whether the tasks are too easy or"
        " too hard",
        ge=0,
    )
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    tools: ToolsConfig = ToolsConfig()
    search: SearchConfig = SearchConfig()
    sql: SqlConfig = SqlConfig()
    judge: JudgeConfig = JudgeConfig()
    reward_model: RewardScoringConfig = RewardScoringConfig()
    prm: ProcessScoringConfig = ProcessScoringConfig()
    web: WebConfig = WebConfig()

    @property
    def several_turns(self) -> bool:
        """True if an environment or an agent plays episodes of several turns."""
        return bool(self.episode or self.agent.command)
