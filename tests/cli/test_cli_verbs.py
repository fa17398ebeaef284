"""Arguments that each verb takes, refuses and passes on. Recorders replace the code behind the
heavy verbs: no model is loaded here.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sixfold import commands
from sixfold.cli import CORE, main, verbs
from sixfold.errors import UserError
from sixfold.recipe.dump import dump_recipe
from sixfold.recipe.keys import MEANT
from sixfold.recipe.knobs import knobs
from sixfold.recipe.toml import load_recipe

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of the functions behind the verbs. Each returns 7, but `generate` no texts."""
    seen: Calls = []

    def recorder(name: str, returned: object) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> object:
            seen.append((name, args, kwargs))
            return returned

        return record

    for module, name in [
        ("sixfold.run.start", "train_run"),
        ("sixfold.report.html", "write_report"),
    ]:
        fake = ModuleType(module)
        setattr(fake, name, recorder(name, 7))
        monkeypatch.setitem(sys.modules, module, fake)
    evaluate = recorder("evaluate_checkpoints", 7)
    monkeypatch.setattr("sixfold.commands.eval.evaluate_checkpoints", evaluate)
    monkeypatch.setattr("sixfold.commands.generate.generate", recorder("generate", []))
    return seen


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with the demo's recipe."""
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(dump_recipe(load_recipe("demo")))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a mistake prints."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    prefix = "sixfold: error: "
    assert captured.err.startswith(prefix)
    return captured.err[len(prefix) : -1]


def test_train_hands_on_the_recipe(calls: Calls) -> None:
    assert (
        main(["train", "--trainer.learning_rate", "2e-6", "demo", "--overwrite", "--run.seed=3"])
        == 7
    )
    name, (recipe,), named = calls[0]
    assert name == "train_run" and named == {"resume": None, "overwrite": True, "stop_after": None}
    assert recipe == load_recipe("demo", ["--trainer.learning_rate=2e-6", "--run.seed=3"])


def test_resume_takes_the_runs_own_recipe(calls: Calls, run_dir: Path) -> None:
    assert main(["train", "--resume", str(run_dir), "--run.seed", "5"]) == 7
    assert calls[0][2] == {"resume": run_dir, "overwrite": False, "stop_after": None}
    assert calls[0][1][0] == load_recipe("demo", ["--run.seed=5"])


def test_sft_stops_after_the_warm_up(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "demo"]) == 7
    assert calls[0][2] == {"resume": None, "overwrite": False, "stop_after": "sft"}
    assert refused(capsys, "sft", "demo", "--sft.steps=0").startswith(
        "sft.steps = 0 in demo: there is no warm-up to run"
    )


def test_eval_of_runs_takes_the_recipe_of_the_first(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run, a checkpoint in it, and a second run with other held-out tasks."""
    for name, heldout in (("a", 7), ("b", 9)):
        (tmp_path / name / "checkpoints" / "step-000001").mkdir(parents=True)
        text = f'[run]\nname = "{name}"\n[data]\nheldout = {heldout}\n'
        (tmp_path / name / "recipe.toml").write_text(text)
    a, b = tmp_path / "a", tmp_path / "b"
    inside = a / "checkpoints" / "step-000001"
    own = load_recipe(str(a / "recipe.toml"), [])
    for words, checkpoints in (
        ([str(a)], [str(a)]),
        ([str(inside)], [str(inside)]),
        ([str(a), str(b)], [str(a), str(b)]),
        (["--checkpoint", str(a), str(b)], [str(a), str(b)]),
        ([str(a), "--checkpoint", "owner/model"], [str(a), "owner/model"]),
    ):
        assert main(["eval", *words]) == 7
        assert calls.pop() == ("evaluate_checkpoints", (own, checkpoints, None, None), {})
        out = capsys.readouterr().out
        assert f"recipe: {a / 'recipe.toml'}" in out
        assert ("another data.heldout" in out) is (str(b) in words)
    assert main(["eval", str(a), "--data.heldout", "5"]) == 7
    changed = load_recipe(str(a / "recipe.toml"), ["--data.heldout", "5"])
    assert calls.pop()[1][0] == changed


def test_eval_generate_and_report_hand_on_their_arguments(calls: Calls, run_dir: Path) -> None:
    assert (
        main(
            [
                "eval",
                "demo",
                "--checkpoint",
                "a",
                "--against",
                "b",
                "--eval.samples=4",
                "--eval.temperature=1",
            ]
        )
        == 7
    )
    sampled = load_recipe("demo", ["--eval.samples=4", "--eval.temperature=1"])
    assert calls.pop() == ("evaluate_checkpoints", (sampled, ["a"], "b", None), {})
    assert (
        main(["eval", "demo", "--checkpoint", "a", "b", "--out", "there", "--checkpoint", "c"]) == 7
    )
    assert calls.pop() == (
        "evaluate_checkpoints",
        (load_recipe("demo", []), ["a", "b", "c"], None, Path("there")),
        {},
    )
    assert main(["eval", "demo", "a", "b", "--checkpoint", "c"]) == 7
    assert calls.pop() == (
        "evaluate_checkpoints",
        (load_recipe("demo", []), ["a", "b", "c"], None, None),
        {},
    )
    where = ["generate", "runs/demo", "--prompt", "1+1="]
    drawn = ["--n", "3", "--temperature", "0", "--max-tokens", "9", "--seed", "4"]
    for words, changed in (
        (drawn, {"n": 3, "temperature": 0.0, "max_tokens": 9, "seed": 4}),
        (
            ["--device", "cuda:1", "--precision", "bfloat16"],
            {"device": "cuda:1", "precision": "bfloat16"},
        ),
        (["--speculation", "ngram"], {"speculation": "ngram"}),
    ):
        assert main([*where, *words]) == 0
        plain = {"n": 1, "temperature": 1.0, "max_tokens": None, "seed": 0, "speculation": "none"}
        asked = {"model": "runs/demo", "prompt": "1+1=", "device": "auto", "precision": "auto"}
        name, (given,), _ = calls.pop()
        assert (name, vars(given)) == ("generate", {**plain, **asked, **changed})
    assert main(["report", str(run_dir)]) == 0
    assert calls.pop() == ("write_report", (run_dir,), {})


MISTAKES = {
    "trian demo": (
        "unknown command 'trian'. Did you mean 'train'? Commands: train, sft, eval, generate,"
        " export, explain, algorithms, diff, report, show, env, replay, audit, critique, data,"
        " import, lab, plan, sandbox, search, serve"
    ),
    "--verbose": (
        "unknown option '--verbose'. Commands: train, sft, eval, generate, export, explain,"
        " algorithms, diff, report, show, env, replay, audit, critique, data, import, lab, plan,"
        " sandbox, search, serve"
    ),
    "train": "sixfold train: give a recipe (sixfold train demo) or --resume RUN, one of the two",
    "train demo --resume x": (
        "sixfold train: give a recipe (sixfold train demo) or --resume RUN, one of the two"
    ),
    "train --resume x --overwrite": (
        "sixfold train: --resume keeps the run and --overwrite deletes it; give one of them"
    ),
    "train demo --stpes 5": "unknown key 'stpes'. Did you mean 'run.steps'? (--stpes)",
    "train demo --overwrit": (
        "sixfold train: unknown option '--overwrit'. Did you mean '--overwrite'? See sixfold train"
        " --help"
    ),
    "train demo extra": "sixfold train: unexpected argument 'extra'. See sixfold train --help",
    "train demo --rollout.samples_per_prompt 1": (
        "rollout.samples_per_prompt = 1 gives every sample an advantage of 0 with 'grpo'. Use at"
        " least 2"
    ),
    "train --resume x --run.name y": (
        "run.name cannot change on resume: the run stays in its folder; leave out --run.name"
    ),
    "train --resume x --run.dir=y": (
        "run.dir cannot change on resume: the run stays in its folder; leave out --run.dir"
    ),
    "train --resume /no/such": (
        "no run at /no/such: no such folder; a run is a folder such as runs/demo"
    ),
    "train --resume /": (
        "/ is not a run: it holds no recipe.toml; a run is a folder such as runs/demo"
    ),
    "eval demo": (
        "sixfold eval: name the runs, checkpoints or models to evaluate by demo, such as sixfold"
        " eval demo runs/demo"
    ),
    "eval": "sixfold eval: give a run to evaluate, such as sixfold eval runs/demo",
    "eval --checkpoint owner/model": (
        "sixfold eval: owner/model is no run, so it has no recipe of its own. Name one first:"
        " sixfold eval RECIPE owner/model"
    ),
    "explain demo --eval.metric arithmetc": (
        "eval.metric = 'arithmetc' is not a reward of this run. Choose one of arithmetic, reward."
        " Did you mean 'arithmetic'?"
    ),
    "eval demo --checkpoint x --data.heldout 0": (
        "nothing to evaluate on: data.heldout = 0 and data.heldout_split is empty; set one of them"
    ),
    "generate m --promt x": (
        "sixfold generate: unknown option '--promt'. Did you mean '--prompt'? See sixfold generate"
        " --help"
    ),
    "generate m --prompt x --run.seed 1": (
        "sixfold generate: unknown option '--run.seed'. See sixfold generate --help"
    ),
    "generate m --prompt x --n 0": (
        "sixfold generate: argument --n: expected an integer >= 1, got '0'. See sixfold generate"
        " --help"
    ),
    "generate m --prompt x --temperature nan": (
        "sixfold generate: argument --temperature: expected 0 (greedy) or a finite number >= 1e-20,"
        " got 'nan'. See sixfold generate --help"
    ),
    "serve m --draft d --speculation ngram": (
        "sixfold serve: --draft and --speculation ngram both propose tokens; give one of them"
    ),
    "generate m --prompt=": "sixfold generate: --prompt is empty; give the text to complete",
    "explain nope.toml": "recipe not found: nope.toml",
    "explain demo --hf_token hf_abcdefgh": (
        "'hf_token' looks like a secret, and a recipe must not contain secrets (value not shown)."
        " Set the environment variable HF_TOKEN (--hf_token)"
    ),
    "diff a": "sixfold diff: the following arguments are required: RUN_B. See sixfold diff --help",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(
    command: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *command.split()) == MISTAKES[command]
    assert calls == []


@pytest.mark.parametrize("verb", ["train", "sft", "explain"])
@pytest.mark.parametrize(
    ("setting", "name", "meant"),
    [
        ("environment.rewards", "arithmatic", "arithmetic"),
        ("environment.episode", "calculater", "calculator"),
        ("eval.strict", "math_strickt", "math_strict"),
        ("environment.rewards", "gone.py:f", "file not found: gone.py"),
    ],
)
def test_an_unknown_name_is_refused_before_torch_is_imported(
    verb: str, setting: str, name: str, meant: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "sixfold.run.start", None)  # its import fails
    error = refused(capsys, verb, "demo", f"--{setting}", name)
    assert repr(name) in error and meant in error


def test_no_arguments_is_short_help_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("usage: sixfold VERB") and captured.out == ""
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == captured.err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(UserError):
        main(["explain", "nope.toml", "--debug"])


@pytest.mark.parametrize("verb", verbs())
def test_help_lists_the_settings_where_there_is_a_recipe(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: sixfold {verb}")
    takes_recipe = verb in (
        "train",
        "sft",
        "eval",
        "explain",
        "plan",
        "audit",
        "critique",
        "search",
    )
    shown = [
        key for key, knob in knobs().items() if f"--{key} " in text and knob.description in text
    ]
    assert shown == (list(knobs()) if takes_recipe else [])


def failing(error: BaseException) -> SimpleNamespace:
    def run(arguments: list[str]) -> int:
        raise error

    return SimpleNamespace(run=run)


def test_exit_codes_of_failed_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_with(error: BaseException) -> None:
        monkeypatch.setitem(sys.modules, "sixfold.commands.report", failing(error))

    end_with(KeyboardInterrupt())
    assert main(["report", "x"]) == 130
    assert capsys.readouterr().err == "sixfold: interrupted\n"
    end_with(UserError("a message\nin two lines"))
    assert refused(capsys, "report", "x") == "a message in two lines"
    end_with(OSError(errno.EACCES, "", "runs/x"))
    assert refused(capsys, "report", "x") == "permission denied: runs/x"
    for bug in (ValueError("a bug"), OSError(errno.EBADF, "a bug")):
        end_with(bug)
        with pytest.raises(type(bug)):
            main(["report", "x"])


def test_a_full_disk_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = ModuleType("sixfold.run.start")

    def train_run(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    fake.train_run = train_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sixfold.run.start", fake)
    assert (
        refused(capsys, "train", "demo")
        == "no space left on runs/demo: free some and `sixfold train --resume runs/demo`"
    )


def test_each_command_has_a_module() -> None:
    modules = {path.stem for path in Path(commands.__path__[0]).glob("*.py")}
    shared = {"eval_comparisons", "eval_steps", "eval_table"}
    assert modules == {"__init__", "shared_task", *shared, *CORE}


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        (["--help"], {"pydantic", "rich", "torch", "argparse", "jinja2"}),
        (["explain", "demo"], {"torch", "transformers", "datasets", "numpy"}),
    ],
)
def test_it_imports_nothing_heavy(command: list[str], heavy: set[str]) -> None:
    code = (
        f"import sys; from sixfold.cli import main; main({command}); print(sorted({heavy} &"
        " set(sys.modules)))"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.endswith("[]\n")


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback() -> None:
    code = "import sys; from sixfold.cli import main; sys.exit(main(['explain', 'demo']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=20) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_unknown_choice_of_kernels_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIXFOLD_KERNELS", "cuda")
    assert main(["explain", "demo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sixfold: error: SIXFOLD_KERNELS = 'cuda'") and error.count("\n") == 1
    assert "Unset it" in error and "'torch'" in error


def test_windows_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from sixfold.errors import UserError, check_platform

    check_platform("posix")
    with pytest.raises(UserError, match="WSL 2"):
        check_platform("nt")


@pytest.mark.nightly
@pytest.mark.slow
def test_warnings_about_torchao_alone_are_not_shown() -> None:
    """If torchao is installed, transformers imports it, and torchao then warns four times."""
    pytest.importorskip("torchao")
    program = "from sixfold.cli import main; main(['--version']); import transformers.quantizers"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_ranks_leave_an_error_to_rank_0_and_outlast_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["explain", "demo", "--trainer.zzzz", "1"]) == 2
    assert capsys.readouterr().err.count("unknown key 'trainer.zzzz'") == 1
    assert waited == [10.0]


HOSTILE = "\x1b]0;owned\x07\x1b[31m\u202e\x9b2J"


def test_errors_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts of files, templates and exceptions reach the error line and the traceback of a bug."""
    monkeypatch.chdir(tmp_path)
    assert main(["explain", f"{HOSTILE}.toml"]) == 2
    error = RuntimeError(HOSTILE)
    sys.excepthook(RuntimeError, error, None)
    said = capsys.readouterr().err
    assert said.count("owned") == 2 and "Error" in said
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(said)


def test_what_torchao_says_at_import_is_silenced_for_every_user_of_the_package() -> None:
    code = (
        "import logging; logging.getLogger('torchao').setLevel(10); import sixfold;"
        "print([logging.getLogger(n).level for n in ('torchao', 'torch.utils._pytree')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "[10, 40]\n", "and a level that the user has set stays"


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("train demo --lr 1e-6", "'trainer.learning_rate'"),
        ("train demo --steps 3", "(run.steps)"),
        ("train demo --model x", "model.path"),
        ("train demo --algorithm DAPO", "algorithm.name"),
        ("train demo --kl 0.1", "(algorithm.kl)"),
        ("train demo --learning-rate 3", "(trainer.learning_rate)"),
        ("train demo --num-generations 3", "'rollout.samples_per_prompt'"),
        ("train demo --batch_size 3", "'rollout.prompts_per_step'"),
        ("train demo --algorithm.name GRPO", "'grpo'"),
        ("train demo --trainer.schedule Cosine", "'cosine'"),
        ("algorithms GRPO", "'grpo'"),
        ("lab Bandit", "bandit."),
        ("lab nope", "bandit, rollouts"),
        ("lab grpo", "grpo-group"),
        ("Train demo", "'train'"),
        ("eval demo x --Out y", "'--out'"),
    ],
)
def test_a_mistyped_word_gets_the_right_suggestion(
    words: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, *words.split())
    assert suggestion in error and "--help'" not in error


def test_names_of_other_trainers_lead_to_settings() -> None:
    assert set(MEANT.values()) <= set(knobs())
    assert not set(MEANT) & {knob.name for knob in knobs().values()}
