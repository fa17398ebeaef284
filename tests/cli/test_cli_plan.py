"""`sixfold plan TARGET`: one page, from arithmetic alone."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.commands.plan_inputs import read_inputs
from sixfold.recipe.memory_text import memory_lines, memory_of
from sixfold.recipe.model_size import model_size
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe
from sixfold.run.planned_work import architecture_of, size_of

QWEN = Path(__file__).parents[1] / "data" / "configs" / "qwen2.5-0.5b"
SECTIONS = [
    *("Work of a step", "Memory of each", "Seconds of a step", "What limits it", "Groups"),
    *("Seconds of a colocated step", "Time and cost"),
]


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_plan_takes_less_than_a_second_and_no_torch() -> None:
    """Seconds of the processor: other work on the machine does not count."""
    code = (
        "import sys; from sixfold.cli import main\n"
        "assert main(['plan', 'gsm8k', '--gpus', '1xL4']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1


def test_the_page_of_a_recipe_on_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "gsm8k", "--gpus", "1xL4")
    assert "16 prompts x 8, prompts of 256 tokens, completions of 256 (at most 512)" in text
    assert "24.0 GB" in text and re.search(r"verdict +fits", text)
    assert "Two pools" not in text
    seconds = float(re.findall(r"^  step +([\d.]+)$", text, re.M)[0])
    hours = float(re.findall(r"400 steps in ([\d.]+) hours", text)[0])
    assert hours == pytest.approx(400 * seconds / 3600, abs=0.05)
    dollars = float(re.findall(r"([\d.]+) US dollars$", text, re.M)[0])
    assert dollars == pytest.approx(0.44 * 400 * seconds / 3600, abs=0.006)


def test_the_memory_is_that_of_explain() -> None:
    """The table of public models gives the same plan as the config.json of the model."""
    flags = ["--model.path", str(QWEN)]
    exact = memory_of(read_inputs("gsm8k", flags, mean_tokens=None).plan)
    listed = memory_of(read_inputs("gsm8k", [], mean_tokens=None).plan)
    assert exact is not None and listed is not None
    assert listed.training == pytest.approx(exact.training, rel=0.002)
    assert listed.sampling == pytest.approx(exact.sampling, rel=0.002)


def test_sizes_survive_the_way_there_and_back() -> None:
    size = model_size(json.loads((QWEN / "config.json").read_text(encoding="utf-8")))
    assert size is not None
    back = size_of(architecture_of("Qwen2.5-0.5B", size))
    for name in ("parameters", "layers", "hidden", "queries", "keys", "vocabulary", "tied"):
        assert getattr(back, name) == getattr(size, name)
    # Biases and norms are spread over the MLP.
    assert back.intermediate == pytest.approx(size.intermediate, abs=3)


def test_the_page_of_70b_on_64_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "70B", "--gpus", "64xH100", "--algorithm.beta", "0.01")
    found = [title for title in SECTIONS if re.search(f"^{title}", text, re.M)]
    assert found == SECTIONS
    assert "weights 35.0 GB" in text and "18 devices hold the training state" in text
    assert re.search(r"verdict +does not fit: .* too much", text)
    assert re.search(r"recommended +async", text)
    for name in ("colocated", "disaggregated", "async"):
        assert re.search(rf"^  {name} +100 steps in", text, re.M)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_sync_in_fp8_is_cast_first_and_sends_half(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, tax = {}, {}
    flags = ("--algorithm.correction", "truncated", "--sync.kind")
    for kind in ("copy", "fp8"):
        text = " ".join(page(capsys, "70B", "--gpus", "64xH100", *flags, kind).split())
        (sync,) = re.findall(r"weight sync (gather .*?) = ", text)
        seconds[kind] = {k: float(v) for k, v in re.findall(r"(\w+) ([\d.e-]+)", sync)}
        # The percentages have no decimals.
        tax[kind] = float(re.findall(r"verdict (\d+)% of a step", text)[0])
        assert ("fp8 " in re.findall(r"shorter (.*?) \(", text)[0]) is (kind == "copy")
    assert set(seconds["fp8"]) == {*seconds["copy"], "cast"}
    assert seconds["fp8"]["broadcast"] == pytest.approx(seconds["copy"]["broadcast"] / 2, rel=0.05)
    assert seconds["fp8"]["gather"] == pytest.approx(seconds["copy"]["gather"], rel=0.05)
    assert tax["fp8"] < 0.7 * tax["copy"]


def test_the_output_head_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5-7B: 152,064 x 3,584 weights, 8,192 tokens, bf16, an H100."""
    text = " ".join(page(capsys, "Qwen2.5-7B", "--gpus", "8xH100").split())
    tokens, vocabulary, hidden = 8192, 152064, 3584
    logits, weight = tokens * vocabulary, vocabulary * hidden
    flops = 6 * logits * hidden + 6 * logits
    moved = 18 * logits + 8 * weight + 6 * tokens * hidden
    assert f"from whole logits: {flops / 1e12:.1f} TFLOP and {moved / 1e9:.1f} GB" in text
    seconds = 6 * logits * hidden / 989.4e12 + 12 * logits / 3.35e12
    assert f"at least {1e3 * seconds:.1f} ms" in text
    assert f"{8 * logits / 1e9:.1f} GB of tables; in chunks of 1,024:" in text
    again = 2 * (tokens - 1024) * weight  # all chunks but the last
    assert f"1,024: {(flops + again) / 1e12:.1f} TFLOP" in text
    assert "output head" not in page(capsys, "demo", "--gpus", "1xH100")


def test_settings_that_would_help_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "7B", "--gpus", "1xRTX 4090")
    assert "does not fit" in text
    assert "trainer.optimizer = 'adamw8bit'" in " ".join(text.split())


def test_a_model_folder_and_its_config_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    folder = page(capsys, str(QWEN), "--gpus", "8xA100")
    config = page(capsys, str(QWEN / "config.json"), "--gpus", "8xA100")
    assert folder.splitlines()[1:] == config.splitlines()[1:]
    assert "0.494 billion parameters; sizes from its config.json" in folder


def test_the_shipped_small_recipes_have_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model from scratch" in page(capsys, "demo", "--gpus", "L4")
    assert "not for adapters" in page(capsys, "gsm8k_lora_7b", "--gpus", "4xL4")


HARDWARE = """\
count = 1
memory_gb = 24
bandwidth_gb_s = {bandwidth}
link_gb_s = 32
network_gb_s = 12.5
[peak_tflops]
bf16 = 121
"""


def test_a_hardware_file_replaces_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "card.toml"
    path.write_text(HARDWARE.format(bandwidth=300), encoding="utf-8")
    mine = page(capsys, "gsm8k", "--hardware", str(path))
    table = page(capsys, "gsm8k", "--gpus", "L4")
    step = re.compile(r"^  step .*$", re.M)
    assert step.findall(mine) == step.findall(table)
    assert "US dollars" not in mine  # no price is known
    path.write_text(HARDWARE.format(bandwidth=0), encoding="utf-8")
    assert "bandwidth_gb_s = 0 must be" in refused(capsys, "gsm8k", "--hardware", str(path))


def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "Nearest names: H100" in refused(capsys, "gsm8k", "--gpus", "8xH10O")
    assert "public model" in refused(capsys, "gsm9k")
    assert "Did you mean 'gsm8k'?" in refused(capsys, "gsm9k")
    assert "Did you mean 'Qwen2.5-7B'?" in refused(capsys, "Qwen2.5-7")
    assert "recipe or model, or --points" in refused(capsys)
    assert "--gpus '0xH100'" in refused(capsys, "gsm8k", "--gpus", "0xH100")
    assert "'1.5' is not a number from 0 to 1" in refused(capsys, "gsm8k", "--pass-rate", "1.5")
    assert "is above their bound of 512" in refused(capsys, "gsm8k", "--length", "600")
    assert "cannot hold the weights" in refused(capsys, "70B", "--gpus", "1xL4")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "vocab_size": 50}', encoding="utf-8")
    told = refused(capsys, str(tmp_path))
    assert "lacks sizes: hidden_size, num_attention_heads" in told and "vocab_size" not in told
    config.write_text('{"model_type": "mamba", "hidden_size": 64}', encoding="utf-8")
    assert "model_type = 'mamba'" in refused(capsys, str(tmp_path))
    unknown = make_plan(load_recipe("gsm8k", ["--model.path", str(tmp_path)]))
    assert "model_type = 'mamba'" in memory_lines(unknown)[0][0]
    config.write_text("[]", encoding="utf-8")
    assert "must hold an object" in refused(capsys, str(tmp_path))
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gsm8k", "--gpus", ""], "--gpus ''"),
        (["gsm8k", "--hardware", ""], "hardware file"),
        (["0.05B"], "at least 0.1B"),
        (["0B"], "at least 0.1B"),
        (["no/such.toml"], "recipe not found: no/such.toml"),
        (["gsm8k", "--run.steps", "0"], "run.steps = 0"),
        (["gsm8k", "--variation", "50"], "'50' is above 10"),
        (["gsm8k", "--simulate", "1001"], "<= 1000"),
        (["--points", "x.csv", "--gpus", "8xH100"], "takes only --json: leave out gpus"),
        (["--points", "x.csv", "--run.steps", "9"], "takes only --json: leave out run.steps"),
        (["--measure", "--out", "FOLDER"], "it is a folder"),
        (["--measure", "--out", "FOLDER/no/hw.toml"], "no folder FOLDER/no"),
        (["--measure", "--json"], "takes only --out FILE: leave out json"),
    ],
)
def test_a_wrong_option_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    assert message.replace("FOLDER", str(tmp_path)) in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_key_value_heads", 5, "num_attention_heads = 14 must be a multiple of"),
        ("num_attention_heads", 13, "hidden_size = 896 must be a multiple of"),
        ("hidden_size", [1, 2], "hidden_size = [1, 2] must be a whole number"),
        ("num_hidden_layers", "24", "num_hidden_layers = '24' must be a whole number"),
        ("text_config", "x", "text_config must be an object"),
    ],
)
def test_a_wrong_size_of_a_model_is_one_line(
    field: str, value: object, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = json.loads((QWEN / "config.json").read_text(encoding="utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | {field: value}), encoding="utf-8")
    assert message in refused(capsys, str(tmp_path))


def test_a_text_config_that_is_null_stands_for_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = json.loads((QWEN / "config.json").read_text(encoding="utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | {"text_config": None}), encoding="utf-8")
    assert "0.494 billion parameters" in page(capsys, str(path))
