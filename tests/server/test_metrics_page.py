"""/metrics: parsed by a strict reader of Prometheus' text format, and compared with requests whose
counts are known.
"""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from serving import Running, running, slowed

from sixfold.engine.engine import Engine
from sixfold.model.loading import Policy
from sixfold.rollout.engine_thread import Rate

TEXT = "/v1/completions"
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf'({NAME})(?:\{{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\}})? (\S+)')


@dataclass
class Family:
    """One metric: everything between its HELP and the next."""

    kind: str = ""
    help: str = ""
    samples: dict[str, float] = field(default_factory=dict)


def parse(page: str) -> dict[str, Family]:
    """Metrics by name. Refuses violations of the exposition format: a sample without TYPE or apart
    from its family, a repeated name or series, a bad value.
    """
    assert page.endswith("\n") and "\r" not in page
    families: dict[str, Family] = {}
    name = ""
    for line in page[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert re.fullmatch(NAME, name) and name not in families, f"{name} twice"
            families[name] = Family(help=words)
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert (
                typed == name
                and kind in ("counter", "gauge", "summary")
                and not families[name].kind
                and not families[name].samples
            )
            families[name].kind = kind
        else:
            found = SAMPLE.fullmatch(line)
            assert found and name and families[name].kind, (
                f"not a sample of a metric with a type: {line!r}"
            )
            series, value = line.rsplit(" ", 1)
            endings = ("_sum", "_count") if families[name].kind == "summary" else ("",)
            assert found[1] in [name + ending for ending in endings], (
                f"{line!r} stands under {name}"
            )
            assert series not in families[name].samples, f"{series} twice"
            assert math.isfinite(float(value))
            families[name].samples[series] = float(value)
    return families


def read(server: Running) -> dict[str, Family]:
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parse(answer.text)


def growing(families: dict[str, Family]) -> dict[str, float]:
    """All series that must never decrease."""
    return {
        series: v for f in families.values() if f.kind != "gauge" for series, v in f.samples.items()
    }


def value(families: dict[str, Family], name: str) -> float:
    return families[f"sixfold_{name}"].samples[f"sixfold_{name}"]


def ask(server: Running, **changes: Any) -> int:
    """The answer's status."""
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "seed": 1} | changes
    return httpx.post(server.url + TEXT, json=asked, timeout=30).status_code


@pytest.mark.parametrize(
    "page",
    [
        "a 1\n",
        "# HELP a x\na 1\n",
        "# HELP a x\n# TYPE a gauge\nb 1\n",
        "# HELP a x\n# TYPE a gauge\na 1\na 1\n",
        "# HELP a x\n# TYPE a gauge\na one\n",
        "# HELP a x\n# TYPE a gauge\na{p=1} 1\n",
        "# HELP a x\n# TYPE a gauge\na 1",
        "# HELP a x\n# TYPE a gauge\na 1\n# HELP a x\n",
        "# HELP a x\n# TYPE a summary\na 1\n",
    ],
)
def test_the_reader_is_strict(page: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        parse(page)


@pytest.mark.slow
def test_the_page_is_well_formed_and_counters_only_grow(server: Running) -> None:
    pages = [read(server)]
    for status, changes in (
        (200, {}),
        (200, {"n": 3, "stream": True}),
        (400, {"top_p": 7}),
        (200, {"prompt": ["abc", "xyz"]}),
    ):
        assert ask(server, **changes) == status
        server.idle()
        pages.append(read(server))
    for families in pages:
        assert all(
            f.kind and f.help and name.startswith("sixfold_") for name, f in families.items()
        )
        assert all((f.kind == "counter") == name.endswith("_total") for name, f in families.items())
    for before, after in zip(map(growing, pages), map(growing, pages[1:]), strict=False):
        assert set(before) <= set(after) and all(after[series] >= v for series, v in before.items())
    assert value(pages[-1], "decoded_tokens_total") > value(pages[0], "decoded_tokens_total")
    needed = ("decoded", "prefill", "reused", "recomputed")
    assert {f"sixfold_{n}_tokens_total" for n in needed} | {
        "sixfold_preemptions_total",
        "sixfold_aborted_total",
    } <= set(pages[0])


@pytest.mark.slow
def test_the_numbers_are_those_of_the_requests(chat_policy: Policy) -> None:
    """A prompt of 40 tokens for 3 samples, twice. First 40 tokens are computed, then only the last
    one, for its logits. The other 199 of 240 are shared or cached.
    """
    with running(chat_policy, max_queue=7) as server:
        tokens = [list(range(5, 45))]
        for _ in range(2):
            assert ask(server, prompt=tokens, n=3, max_tokens=5, stop_token_ids=[]) == 200
        server.idle()
        page = read(server)
        assert (value(page, "prefill_tokens_total"), value(page, "reused_tokens_total")) == (
            41,
            199,
        )
        assert value(page, "prefix_hit_ratio") == pytest.approx(199 / 240)
        assert 6 <= value(page, "decoded_tokens_total") == server.engine.stats.decoded_tokens <= 30
        summary = page["sixfold_generation_seconds"].samples
        assert (
            summary["sixfold_generation_seconds_count"] == 2
            and 0 < summary["sixfold_generation_seconds_sum"] < 30
        )
        answers = page["sixfold_http_answers_total"].samples
        assert answers['sixfold_http_answers_total{path="/v1/completions",status="200"}'] == 2
        assert value(page, "queue_prompts") == 7
        assert value(page, "kv_blocks_used") == 0 < value(page, "kv_blocks_idle")
        assert (
            value(page, "kv_blocks_idle") + value(page, "kv_blocks_free")
            == value(page, "kv_blocks")
            == server.engine.scheduler.blocks.count
        )
        assert value(page, "tokens_per_second") > 0


@pytest.mark.slow
def test_the_gauges_of_a_running_request(chat_policy: Policy) -> None:
    """One completion is stopped in its second step. A prompt of 20 tokens and one sampled token
    fill 21 slots of 2 blocks. The newest token is not computed yet.
    """
    gate, reached = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        step = engine.step

        def held() -> Any:
            if engine.stats.decoded_tokens == 1:
                reached.set()
                gate.wait(20)
            return step()

        engine.step = held  # type: ignore[method-assign]

    with running(chat_policy, hold) as server:
        asking = threading.Thread(
            target=ask, args=(server,), kwargs={"prompt": list(range(5, 25)), "max_tokens": 4}
        )
        asking.start()
        assert reached.wait(20)
        page = read(server)
        gate.set()
        asking.join(20)
        assert (value(page, "running_sequences"), value(page, "kv_blocks_used")) == (1, 2)
        assert value(page, "kv_fragmentation_ratio") == pytest.approx((2 * 16 - 20) / (2 * 16))
        server.idle()
        assert value(read(server), "kv_fragmentation_ratio") == 0


@pytest.mark.slow
def test_a_client_that_leaves_is_counted_once(chat_policy: Policy) -> None:
    with running(chat_policy, slowed(0.02)) as server:
        asked = {
            "model": "tiny",
            "prompt": "q",
            "max_tokens": 400,
            "stream": True,
            "stop_token_ids": [],
        }
        with httpx.stream("POST", server.url + TEXT, json=asked, timeout=30) as answer:
            next(answer.iter_lines())
        server.idle()
        assert value(read(server), "aborted_total") == 1
        assert ask(server) == 200
        server.idle()
        assert value(read(server), "aborted_total") == 1


def test_a_rate_is_that_of_a_steady_stream_and_fades() -> None:
    rate = Rate()
    rate.add(50, now=100.0)
    assert rate.value(100.0) == 5.0
    assert rate.value(110.0) == pytest.approx(5.0 / math.e)
    steady = Rate()
    for k in range(10_000):
        steady.add(3, now=k * 0.01)
    assert steady.value(100.0) == pytest.approx(300, rel=2e-3)
    assert steady.value(400.0) < 1e-9
