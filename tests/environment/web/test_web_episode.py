"""Episodes in a browser: tools, observations, rewards, and failures of the infrastructure."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from browsing import needs_chromium
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.environment.episode import Action, End, Episode, Observation, final_reward
from sixfold.environment.episodes import load_episode
from sixfold.environment.grade import right_or_wrong
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.observation import ToolsFailed
from sixfold.errors import UserError
from sixfold.types import Task, ToolCall
from sixfold_environments.audit.trials import Trials
from sixfold_environments.web.episode import WebShop
from sixfold_environments.web.settings import WebSettings
from sixfold_environments.web.tasks import shop_calls, shop_tasks
from sixfold_environments.web.user_site import Web

TASKS = shop_tasks(40, seed=0)


def call(name: str, arguments: dict[str, Any] | str) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(name, text)


async def played(episode: Episode, *replies: list[ToolCall]) -> list[Observation | End]:
    """The first observation and those after each reply. An empty reply ends the episode."""
    found: list[Observation | End] = [await episode.start()]
    try:
        for calls in replies:
            found.append(await episode.step(Action("said", calls=tuple(calls))))
        return found
    finally:
        await episode.close()  # type: ignore[attr-defined]


def test_an_episode_from_task_to_reward() -> None:
    task, calls = shop_calls(1, seed=0)[0]
    first, *seen, end = asyncio.run(played(WebShop(task), *[[call(*c)] for c in calls], []))
    assert isinstance(first, Observation)
    (message,) = first.messages
    assert message["role"] == "user" and message["content"].startswith(task.prompt_text + "\n[1] ")
    names = [tool["function"]["name"] for tool in first.tools]
    assert names == ["click", "type", "select", "back", "more"]
    typing = first.tools[1]["function"]["parameters"]
    assert typing["required"] == ["element", "text"]
    assert typing["properties"]["submit"]["type"] == "boolean"
    for answer in seen:
        assert isinstance(answer, Observation) and not answer.tool_errors
        assert answer.messages[0]["role"] == "tool"
        assert answer.events[0]["kind"] == "tool_call"
    assert isinstance(end, End) and end.reward == right_or_wrong(True)
    _, end = asyncio.run(played(WebShop(task), []))
    assert isinstance(end, End) and end.reward == right_or_wrong(False)


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("click", {"element": 99}, "element"),
        ("click", {"element": "two"}, "wrong_argument"),
        ("click", {}, "missing_argument"),
        ("click", "{", "bad_json"),
        ("type", {"element": 1, "text": "x"}, "role"),
        ("type", {"element": 2, "text": "\x07"}, "text"),
        ("select", {"element": 2, "option": "x"}, "role"),
        ("back", {}, "history"),
        ("fly", {}, "unknown_tool"),
    ],
)
def test_a_wrong_action_is_a_structured_error(name: str, arguments: Any, kind: str) -> None:
    _, answer = asyncio.run(played(WebShop(TASKS[0]), [call(name, arguments)]))
    assert isinstance(answer, Observation) and answer.tool_errors == 1
    error = json.loads(answer.messages[0]["content"])["error"]
    assert error["kind"] == kind == answer.events[0]["error"] and error["message"]


def test_actions_of_one_reply_run_in_order() -> None:
    task, calls = shop_calls(1, seed=0)[0]
    _, answer, end = asyncio.run(played(WebShop(task), [call(*c) for c in calls], []))
    assert isinstance(answer, Observation) and len(answer.messages) == len(calls)
    assert isinstance(end, End) and end.reward == right_or_wrong(True)


ANY_CALL = st.one_of(
    st.builds(ToolCall, st.sampled_from(["click", "type", "select", "back", "x"]), st.text()),
    st.builds(lambda n: call("click", {"element": n}), st.integers(-2, 9)),
    st.builds(
        lambda n, t, s: call("type", {"element": n, "text": t, "submit": s}),
        st.integers(1, 4),
        st.one_of(st.text(max_size=9), st.sampled_from(["cup", "3", "ann"])),
        st.booleans(),
    ),
    st.just(call("back", {})),
)


@given(st.sampled_from(TASKS), st.lists(ANY_CALL, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_actions_are_answered_by_the_contract(task: Task, calls: list[ToolCall]) -> None:
    answers = asyncio.run(played(WebShop(task), *[[one] for one in calls], []))
    for answer in answers[:-1]:
        assert isinstance(answer, Observation) and answer.messages
        assert json.loads(json.dumps(list(answer.events))) == list(answer.events)
        assert len(answer.messages[0]["content"]) < 9000
    assert isinstance(answers[-1], End)
    final_reward(answers[-1])
    again = asyncio.run(played(WebShop(task), *[[one] for one in calls], []))
    assert [_shown(a) for a in again] == [_shown(a) for a in answers]


def _shown(answer: Observation | End) -> object:
    return answer.messages if isinstance(answer, Observation) else answer.reward


def test_a_task_of_another_source_has_no_shop() -> None:
    with pytest.raises(ValueError, match=r"data\.source"):
        WebShop(Task("1", "12+3="))


SITE = '''
from sixfold_environments.web.user_site import Visit


class Notes:
    """A site with one state per task."""

    def __init__(self, task):
        self.notes = [task.prompt_text]

    def __call__(self, environ, start):
        if environ["REQUEST_METHOD"] == "POST":
            self.notes.append(environ["wsgi.input"].read().decode())
        start("200 OK", [("Content-Type", "text/html"), ("Set-Cookie", "who=me")])
        page = f"{environ['PATH_INFO']}<form method=post><input name=n aria-label=Note></form>"
        return [page.encode()]


def app(environ, start):
    start("200 OK", [("Content-Type", "text/html")])
    return [b"<p>plain</p>"]


def noted(visit: Visit):
    return visit.site.notes[1:] == ["n=tea"] and visit.cookies == {"who": "me"}


def half(visit: Visit):
    return 0.5


def text(visit: Visit):
    return "1"
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    file = tmp_path / "notes_site.py"
    file.write_text(SITE)
    return file


def _task(**columns: Any) -> Task:
    return Task("1", "note tea", columns=columns)


def test_a_site_of_the_user(site: Path) -> None:
    goals = (f"{site}:noted", f"{site}:half")
    make = load_episode("web").with_settings(WebSettings(site=f"{site}:Notes", goals=goals))
    noted = _task(goal="noted", start="/list?a=1")
    first, _, end = asyncio.run(
        played(make(noted), [call("type", {"element": 1, "text": "tea", "submit": True})], [])
    )
    assert isinstance(first, Observation)
    assert first.messages[0]["content"] == 'note tea\n/list\n[1] textbox "Note"'
    assert isinstance(end, End) and end.reward == 1.0
    assert asyncio.run(played(make(noted), []))[-1] == End(reward=0.0)
    assert asyncio.run(played(make(_task(goal="half")), []))[-1] == End(reward=0.5)
    no_number = Web.with_settings(WebSettings(site=f"{site}:Notes", goals=(f"{site}:text",)))
    with pytest.raises(TypeError, match="returned str, not a number"):
        asyncio.run(played(no_number(_task()), []))
    for wrong in (_task(), _task(goal="other"), _task(goal=["noted"])):
        with pytest.raises(ValueError, match=r"environment\.web\.goals"):
            make(wrong)
    plain = Web.with_settings(WebSettings(site=f"{site}:app", goals=(f"{site}:half",)))
    first, end = asyncio.run(played(plain(_task()), []))
    assert isinstance(first, Observation) and first.messages[0]["content"] == "note tea\nplain"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, r"environment\.web\.site"),
        ({"site": "{}:Notes"}, r"environment\.web\.goals"),
        ({"site": "{}:Missing", "goals": ("{}:half",)}, "Missing"),
        ({"site": "{}:Notes", "goals": ("{}:halv",)}, "half"),
        ({"site": "http://example.com", "goals": ("{}:half",)}, r"environment\.web\.site"),
    ],
)
def test_settings_that_cannot_be_used(site: Path, given: dict[str, Any], named: str) -> None:
    filled = {
        name: tuple(v.format(site) for v in value) if name == "goals" else value.format(site)
        for name, value in given.items()
    }
    with pytest.raises(UserError, match=named):
        Web.with_settings(WebSettings(**filled))


def test_a_subclass_gets_the_settings_of_the_run_unless_it_has_its_own() -> None:
    class Small(WebShop):
        settings = WebSettings(page_characters=60)

    class Strict(WebShop):
        """The reward is 0."""

    class OtherTools(ToolEpisode): ...

    assert Small.with_settings(WebSettings(page_characters=90)) is Small
    made = Strict.with_settings(WebSettings(page_characters=90))(TASKS[0])
    assert isinstance(made, Strict) and made.settings.page_characters == 90
    with pytest.raises(UserError, match=r"environment\.web\.site"):
        type("Own", (Web,), {}).with_settings(WebSettings())


def test_a_site_that_is_down_fails_the_episode_and_not_the_policy(site: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    make = Web.with_settings(WebSettings(site=url, goals=(f"{site}:half",)))
    with pytest.raises(Exception, match=r"environment\.web\.site"):
        asyncio.run(played(make(_task())))


@needs_chromium
def test_a_dead_browser_is_a_failure_of_the_environment() -> None:
    from sixfold_environments.web import chromium

    make = WebShop.with_settings(WebSettings(browser="chromium"))

    async def after_death() -> None:
        episode = make(TASKS[0])
        await episode.start()
        await chromium._HOST.run(lambda: chromium._HOST._browser.close())
        with pytest.raises(ToolsFailed, match="Chromium"):
            await episode.step(Action("", calls=(call("click", {"element": 1}),)))
        await episode.close()  # type: ignore[attr-defined]

    asyncio.run(after_death())
    task, calls = shop_calls(1, seed=0)[0]
    *_, end = asyncio.run(played(make(task), *[[call(*c)] for c in calls], []))
    assert isinstance(end, End) and end.reward == right_or_wrong(True)


def test_the_audit_plays_the_worked_replies() -> None:
    from sixfold.checks.environment import Environment
    from sixfold.environment.solved import REWARD
    from sixfold_environments.audit.of_recipe import _with_calls

    with Environment(["arithmetic"], metric=REWARD) as environment:
        trials = Trials(environment, WebShop, read_calls=_with_calls)
        assert all(trials.solved([(task, task.trace or "") for task in TASKS[:10]]))
        assert not any(trials.solved([(task, "done") for task in TASKS[:10]]))


PROGRAM = """
import asyncio
from sixfold_environments.web.episode import WebShop
from sixfold_environments.web.settings import WebSettings
from sixfold_environments.web.tasks import shop_tasks

async def main():
    episode = WebShop.with_settings(WebSettings(browser="chromium"))(shop_tasks(1, seed=0)[0])
    await episode.start()
    print("started", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def _descendants(pid: int) -> set[int]:
    own: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            own.update(int(child) for child in file.read_text().split())
    return own.union(*(_descendants(child) for child in own))


@needs_chromium
def test_a_killed_run_leaves_no_browser() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"started\n"
        left = _descendants(run.pid)
        assert len(left) > 2
        run.kill()
    for _ in range(100):
        left = {pid for pid in left if _is_alive(pid)}
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
