"""`sixfold algorithms`: the table at any width, one algorithm in full, and converted settings."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from sixfold.algorithm.lineage import NAMING, cells
from sixfold.algorithm.method import Method
from sixfold.algorithm.zoo import ZOO
from sixfold.cli import main
from sixfold.commands.algorithms import FIXED, markdown_table, meaning, recipe_lines, text_table
from sixfold.preference.zoo import LOSSES
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.schema import AlgorithmConfig

ROWS = list(ZOO.values())


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["algorithms", *argv]) == 0
    return capsys.readouterr().out


def read_back(text: str) -> list[dict[str, str]]:
    """The cells of the table. The rule below the head marks the columns."""
    rows: list[dict[str, str]] = [{} for _ in ROWS]
    for block in text.split("\n\n"):
        head, rule, *lines = block.splitlines()
        starts = [i for i, c in enumerate(rule) if c == "-" and (i == 0 or rule[i - 1] == " ")]
        spans = list(zip(starts, [*starts[1:], None], strict=True))
        for row, line in zip(rows, lines, strict=True):
            row |= {head[a:b].strip(): line[a:b].strip() for a, b in spans}
    return rows


@pytest.mark.parametrize("width", [40, 100, 160, 1000])
def test_the_table_has_every_cell_and_keeps_to_the_width(width: int) -> None:
    text = text_table(ROWS, width)
    assert read_back(text) == [cells(row) for row in ROWS]
    if width >= 100:
        assert max(map(len, text.splitlines())) <= width
    assert len(text.split("\n\n")) == {40: 10, 100: 4, 160: 2, 1000: 1}[width]


def test_the_width_is_the_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        losses = text_table(list(LOSSES.values()), width)
        assert printed(capsys) == f"{text_table(ROWS, width)}\n\n{losses}\n"


def test_markdown_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    markdown, _, losses = printed(capsys, "--format", "markdown").partition("\n\n")
    assert markdown == markdown_table(ROWS)
    assert losses == markdown_table(list(LOSSES.values())) + "\n"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines()]
    assert [line[1:] for line in lines[2:]] == [list(cells(row).values())[1:] for row in ROWS]
    assert lines[2 + list(ZOO).index("gspo_token")][0] == "[gspo_token](gspo.md)"
    data = json.loads(printed(capsys, "--format", "json"))
    assert [{key: row[key] for key in cells(ROWS[0])} for row in data[: len(ROWS)]] == [
        cells(row) for row in ROWS
    ]
    assert [row["name"] for row in data[len(ROWS) :]] == list(LOSSES)
    dapo = data[list(ZOO).index("dapo")]
    assert (
        dapo["choices"]["clip_high"] == 0.28
        and {c["field"]: c["after"] for c in dapo["changes"]}["dynamic_sampling"] == 4
    )


def test_one_algorithm_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sixfold.algorithm import dapo

    monkeypatch.setenv("COLUMNS", "200")  # text is wrapped to the width of the terminal
    text = printed(capsys, "dapo")
    assert text.startswith((dapo.__doc__ or "").strip())
    assert (
        'changes to grpo\n  aggregation       "sequence" -> "token"\n  clip_high        '
        " 0.2 -> 0.28\n  overlong_buffer   0.0 -> 0.2\n  dynamic_sampling  0 -> 4\n\n" in text
    )
    for field in fields(Method):
        assert (f"\n  {field.name} = " in text.partition("in a recipe")[0]) == (
            field.name not in NAMING
        )
    assert "baseline: group mean, divided by: group std" in text and "ratio: token" in text
    assert "changes to" not in printed(capsys, "reinforce")


def test_every_choice_has_a_meaning() -> None:
    choices = {field.name for field in fields(Method)} - {*NAMING}
    assert set(FIXED) == choices - set(AlgorithmConfig.model_fields)
    assert all(meaning(choice) for choice in choices)


@pytest.mark.parametrize("name", ZOO)
def test_the_recipe_lines_make_the_row(name: str) -> None:
    written = tomllib.loads("\n".join(recipe_lines(ZOO[name])))
    assert resolve_algorithm(AlgorithmConfig(**written["algorithm"])) == ZOO[name]
    assert (written.get("rollout", {}).get("samples_per_prompt", 1) >= 2) == (
        ZOO[name].group_baseline or ZOO[name].dynamic_sampling > 0
    )
    assert ("critic" in written) == (name == "ppo") and ("reference" in written) == (name == "opd")


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in {
        ("dappo",): (
            "no algorithm or preference loss 'dappo'. Did you mean 'dapo'? Known:"
            f" {', '.join([*ZOO, *LOSSES])}"
        ),
        ("dpo", "--convert", "verl"): "'dpo' is a preference loss, which is converted to trl only",
        ("dpo", "--try", "--sft-steps", "3"): "sixfold algorithms: --sft-steps is for algorithms",
        (
            "--convert",
            "slime",
        ): "sixfold algorithms: argument --convert: invalid choice: 'slime' (choose from",
        (
            "--format",
            "html",
        ): "sixfold algorithms: argument --format: invalid choice: 'html' (choose from",
        ("grpo", "--format", "markdown"): (
            "sixfold algorithms: --format markdown prints the whole table only; with NAME or"
            " --convert use text or json"
        ),
        ("--convert", "trl", "nope"): (
            f"no algorithm or preference loss 'nope'. Known: {', '.join([*ZOO, *LOSSES])}"
        ),
        ("sppo_hard",): ("no algorithm or preference loss 'sppo_hard'. See sppo. Known: reinforce"),
        ("DPO-positive",): "no algorithm or preference loss 'DPO-positive'. See dpop.",
        ("--convrt", "trl"): (
            "sixfold algorithms: unknown option '--convrt'. Did you mean '--convert'? See sixfold"
            " algorithms --help"
        ),
    }.items():
        assert main(["algorithms", *argv]) == 2
        assert capsys.readouterr().err.startswith(f"sixfold: error: {message}")


def paste(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """(settings to paste, remaining output) of a conversion."""
    text = printed(capsys, "--convert", *argv)
    _, block = text.split(f"{argv[1]} in {argv[0]}\n\n")
    command, _, rest = block.partition("\n\n")
    return command, rest


def words(command: str) -> Sequence[str]:
    """The words of a command, as a shell splits them."""
    return shlex.split(command.replace("\\\n", " "))


def test_hydra_lines_survive_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    command, rest = paste(capsys, "verl", "dr_grpo")
    given = words(command)
    assert given[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert "actor_rollout_ref.actor.loss_scale_factor=${data.max_response_length}" in given
    assert (
        "actor_rollout_ref.actor.optim.betas=[0.9,0.95]" in given
        and "algorithm.norm_adv_by_std_in_grpo=False" in given
    )
    assert "defaults that must stay:" in rest and "clip_ratio_low = 0.2" in rest
    assert not command.endswith("\\")


def test_flags_survive_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(paste(capsys, "openrlhf", "dapo")[0])
    at = given.index("--actor.eps_clip_low_high")
    assert given[at : at + 3] == ["--actor.eps_clip_low_high", "0.2", "0.28"]
    assert (
        given[given.index("--algo.dynamic_filtering_enable") - 1].isdigit()
        and given[-1] == "--algo.dynamic_filtering_enable"
    )


def test_python_lines_are_python(capsys: pytest.CaptureFixture[str]) -> None:
    command, rest = paste(capsys, "trl", "dapo")
    config, append = ast.parse(command).body
    assert (
        isinstance(config, ast.Expr)
        and isinstance(config.value, ast.Call)
        and ast.unparse(config.value.func) == "GRPOConfig"
    )
    assert {k.arg: ast.literal_eval(k.value) for k in config.value.keywords}["epsilon_high"] == 0.28
    assert (
        ast.unparse(append)
        == "reward_funcs.append(get_soft_overlong_punishment(max_completion_len=64,"
        " soft_punish_cache=13))"
    )
    assert (
        "standard deviation divides by K - 1" in rest and "not available: dynamic sampling" in rest
    )


def test_strings_that_look_like_numbers_are_quoted_for_hydra() -> None:
    from sixfold_interop import Sizes, convert
    from sixfold_interop.text import conversion_text

    sizes = Sizes(8, 8, 64)
    masked = convert("verl", replace(ZOO["grpo"], correction="masked"), sizes)
    assert """'algorithm.rollout_correction.rollout_is_threshold="0.5_5"'""" in conversion_text(
        "verl", [masked], 160, sizes
    )


def test_all_rows_are_converted_at_once_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--convert", "openrlhf")
    assert [line for line in text.splitlines() if line.endswith(" in openrlhf")] == [
        f"{name} in openrlhf" for name in ZOO
    ]
    data = json.loads(printed(capsys, "--convert", "trl", "--format", "json"))
    assert [row["row"] for row in data] == list(ZOO) and data[2]["changed"]["loss_type"] == "grpo"


@pytest.mark.slow
def test_it_reads_the_zoo_without_torch() -> None:
    code = (
        "import sys; from sixfold.cli import main; main(['algorithms', 'dpo']); sys.exit('torch'"
        " in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
