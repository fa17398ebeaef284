"""Shared by all tests: one thread, no network, and tiny models made once.

The process that only distributes tests to workers loads this file too, before it starts them. So
torch is imported where it is needed, not at the top.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import lanes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sixfold.model.loading import Policy
    from sixfold.recipe.schema import ScratchConfig

# Before torch is imported: it reads them once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
# `sixfold plan --measure` on this machine must not change the reports of runs in tests.
os.environ.setdefault("XDG_CACHE_HOME", f"{tempfile.gettempdir()}/sixfold-tests-without-a-cache")
# Flushing to the disk is most of the wall time of a tiny run. A killed process loses nothing that
# it has written; only a power failure would, and no test can cause one. Tests of the order of
# flushes replace this function by one that takes notes.
os.fsync = lambda descriptor: None  # type: ignore[assignment]

VOCABULARY = 61
END = 1
# Widths at which the CPU's kernels give a row the same bits in any company: heads of 32 query
# numbers per key head, MLPs in whole vectors.
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, bos_token_id=None, eos_token_id=END, pad_token_id=0,
)  # fmt: skip
_EXTRAS: dict[str, dict[str, object]] = {
    "qwen3": {},
    "llama": {},
    "gemma": {},
    "gemma2": dict(
        sliding_window=8,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    ),
    "gemma3_text": dict(sliding_window=8, query_pre_attn_scalar=16),
    "gpt2": dict(n_embd=64, n_layer=2, n_head=2, n_positions=256),
    "minigpt": dict(num_key_value_heads=4),
    "qwen3_moe": dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
}
ARCHITECTURES = tuple(_EXTRAS)
# Attention of other shapes: values smaller than keys.
_EXTRAS["deepseek_v3"] = dict(
    num_key_value_heads=4, head_dim=8, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16,
    moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
# Sinks; windows on every other layer, YaRN, experts with biases.
_EXTRAS["gpt_oss"] = dict(
    sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
    rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0,
    beta_slow=1.0, truncate=False,
                         original_max_position_embeddings=64),
)  # fmt: skip
OTHER_ATTENTION = ("deepseek_v3", "gpt_oss")


LONG = (
    "devices",
    "run/test_resume.py",
    "run/test_reference_placements.py",
    "run/test_several_ranks.py",
    "trainer/test_context_parallel.py",
    "trainer/test_expert_parallel.py",
    "trainer/test_sharded.py",
    "trainer/test_tensor_parallel.py",
    "engine/test_sanitized_kernels.py",
    "run",
    "checkpoint",
    "commands",
    "engine",
    "rollout",
    "recipes",
    "server",
    "reference",
    "environment",
)
"""Folders and files whose tests begin first: a long file that begins last keeps one worker busy
while the other has nothing to do."""


PASSED = pytest.StashKey[frozenset[str]]()
"""Test files that the daily lane leaves out."""
BEFORE = pytest.StashKey[dict[str, str]]()
"""Fingerprints of test files when they began."""
POSTPONED = pytest.StashKey[frozenset[str]]()
"""Tests that the daily lane leaves to `make test-all`, because too much has changed."""
FILES: Counter[str] = Counter()
"""CPU seconds of the daily tests of a file, with their fixtures. It has every file that was run."""
SECONDS: Counter[str] = Counter()
"""CPU seconds of daily tests, without fixtures."""
FAILED: set[str] = set()
"""Files with a test that has failed."""


@cache
def _prepare_torch() -> None:
    """Compute in one thread, and make our attention known to transformers."""
    import torch

    from sixfold.model.attention import register

    torch.set_num_threads(1)
    register()


def pytest_collectstart() -> None:
    """Runs in processes that run tests, not in the one that distributes them."""
    _prepare_torch()


def pytest_collection_finish() -> None:
    """Leave what is there by now out of garbage collections: a tenth of the time of small tests."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--daily",
        action="store_true",
        help="leave out nightly tests, and those of tests/lanes.py that have passed as they are",
    )
    parser.addoption(
        "--note-passed",
        action="store_true",
        help="write tests/seconds.json, and the files that pass to tests/lanes.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Properties draw the same examples every day, and a third of them; new ones in test-all."""
    if config.getoption("--note-passed") and not hasattr(config, "workerinput"):
        if config.getoption("--daily") or config.getoption("-m") or config.getoption("-k"):
            raise pytest.UsageError("--note-passed needs every test of a file")
        if any("::" in given for given in config.args):
            raise pytest.UsageError("--note-passed needs every test of a file: name the file")
        config.stash[BEFORE] = lanes.fingerprints()
    if config.getoption("--daily"):
        sent = getattr(config, "workerinput", None)
        passed = sent["passed"] if sent else sorted(map(str, lanes.unchanged()))
        config.stash[PASSED] = frozenset(passed)
        left = sent["postponed"] if sent else lanes.postponed(set(map(Path, passed)))
        config.stash[POSTPONED] = frozenset(left)
    # How fast an example is drawn and runs depends on what else the machine does.
    settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(
        "daily", settings.get_profile("steady"), derandomize=True, database=None
    )
    daily = config.getoption("--daily") or config.getoption("-m") == "not slow"
    settings.load_profile("daily" if daily else "steady")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A process that runs tests is told what to leave out: to find it takes seconds."""
    node.workerinput["passed"] = sorted(node.config.stash.get(PASSED, ()))
    node.workerinput["postponed"] = sorted(node.config.stash.get(POSTPONED, ()))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if passed := config.stash.get(PASSED, None):
        terminalreporter.line(f"left out: {len(passed)} test files that have passed as they are")
    if postponed := config.stash.get(POSTPONED, None):
        terminalreporter.line(
            f"left to make test-all: the {len(postponed)} longest tests, as more has changed than"
            f" {lanes.BUDGET:.0f} CPU seconds can test"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return str(collection_path) in config.stash.get(PASSED, ()) or None


def pytest_runtest_logstart() -> None:
    _CLOCK[0] = _cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on each report what its phase took, where the test runs."""
    report = yield
    before, _CLOCK[0] = _CLOCK[0], _cpu_seconds()
    report.cpu_seconds = _CLOCK[0] - before
    return report


_CLOCK = [0.0]
"""What `_cpu_seconds` gave last."""


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for. Load hardly changes it."""
    return sum(os.times()[:4])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    daily = 0.0 if "nightly" in report.keywords else report.cpu_seconds
    if "hypothesis" in report.keywords:
        daily /= 3  # which a daily lane draws fewer examples for
    file = report.nodeid.partition("::")[0]
    FILES[file] += daily
    if report.failed:
        FAILED.add(file)
    if report.when == "call":
        SECONDS[report.nodeid] += daily


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Runs last in the process that distributes tests: it has the reports of all."""
    noted = session.config.stash.get(BEFORE, None)
    if noted is None or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    lanes.note(noted, run=set(FILES), failed=FAILED, every=exitstatus == pytest.ExitCode.OK)
    if set(FILES) >= {f"tests/{name}" for name in noted}:
        lanes.note_seconds(FILES, SECONDS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, mark what `mostly_slow` and `mostly_nightly` leave to a longer lane, and
    leave out of the daily lane what is nightly or has passed as it is.
    """
    for lane in ("slow", "nightly"):
        seen: Counter[tuple[Path, str]] = Counter()
        for item in items:
            if mark := item.get_closest_marker(f"mostly_{lane}"):
                function = (item.path, item.location[2].partition("[")[0])
                seen[function] += 1
                if seen[function] > mark.args[0]:
                    item.add_marker(lane)
    if config.getoption("--daily"):
        postponed = config.stash[POSTPONED]
        left = [
            item for item in items if item.get_closest_marker("nightly") or item.nodeid in postponed
        ]
        items[:] = [item for item in items if item not in set(left)]
        config.hook.pytest_deselected(items=left)
        for item in items:
            _draw_less(item)
    places = {path: _place(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: places[item.path])


def _place(path: Path) -> int:
    here = Path(__file__).parent
    found = (i for i, name in enumerate(LONG) if path.is_relative_to(here / name))
    return next(found, len(LONG))


def _draw_less(item: pytest.Item) -> None:
    """A property draws a third of its examples."""
    function = getattr(item, "obj", None)
    chosen = getattr(function, "_hypothesis_internal_use_settings", None)  # no public name
    if chosen is not None and not getattr(function, "draws_less", False):
        fewer = settings(chosen, max_examples=max(chosen.max_examples // 3, 5))
        function._hypothesis_internal_use_settings = fewer
        function.draws_less = True


def make_tiny(name: str, **extra: object) -> PreTrainedModel:
    """A tiny random model of a transformers model type, whose distributions are far from flat."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _prepare_torch()
    sizes = {} if name == "gpt2" else _SIZES
    config = AutoConfig.for_model(
        name,
        **{
            "vocab_size": VOCABULARY,
            "eos_token_id": END,
            **sizes,
            **_EXTRAS.get(name, {}),
            **extra,
        },
    )
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
    ):  # a test may ask first while it is in inference mode
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.dim() > 1:
                    p.normal_(0, 0.12)
                elif key.endswith(
                    ".sinks"
                ):  # far from 0, so that one that is dropped or counted twice shows
                    p.normal_(0, 1.5)
    return model.eval()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], PreTrainedModel]:
    """tiny(architecture): a tiny model under our attention and norms. The same object for all
    tests: copy it before changing it.
    """
    from sixfold.kernels.norms import fuse_norms
    from sixfold.model.attention import NAME

    made: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in made:
            made[name] = make_tiny(name)
            made[name].set_attn_implementation(NAME)
            fuse_norms(made[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def plain() -> Callable[[str], PreTrainedModel]:
    """plain(architecture): the same weights as transformers alone would run them, the oracle."""
    made: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in made:
            made[name] = make_tiny(name)
            made[name].set_attn_implementation("eager")
        return made[name]

    return get


@pytest.fixture(scope="session")
def scratch_config() -> ScratchConfig:
    """A model of two layers with the default alphabet."""
    from sixfold.recipe.schema import ScratchConfig

    return ScratchConfig(
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        context=128,
    )


@pytest.fixture(scope="session")
def policy(scratch_config: ScratchConfig) -> Policy:
    """A scratch model with its tokenizer. The same object for all tests: copy it before changing
    it.
    """
    from sixfold.model.loading import load_policy
    from sixfold.recipe.schema import ModelConfig

    return load_policy(ModelConfig(scratch=scratch_config), seed=3, device="cpu")


@pytest.fixture(autouse=True)
def unset_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have the width of a pipe, whatever set COLUMNS in this process before."""
    monkeypatch.delenv("COLUMNS", raising=False)
