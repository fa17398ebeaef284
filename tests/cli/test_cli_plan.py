"""`sixfold plan TARGET`: one page, from arithmetic alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.data.profile import Measurement, ProfileFile, ProfileKey
from sixfold.recipe.explain.memory import memory_lines
from sixfold.recipe.memory import memory_of
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe
from sixfold.sizing.model_size import model_size
from sixfold_planning.page.inputs import read_inputs
from sixfold_planning.planned_work import architecture_of, size_of

QWEN = Path(__file__).parents[1] / "data" / "configs" / "qwen2.5-0.5b"
SECTIONS = [
    *("Work of a step", "Memory of each", "Seconds of a step", "What limits it", "Groups"),
    *("Seconds of a colocated step", "Time and cost"),
]


def page(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    return capsys.readouterr().out


CANNOT, WITH_SETTINGS = 1, 4


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_plan_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from sixfold.cli import main\n"
        "assert main(['plan', 'gsm8k', '--gpus', '1xL4']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def test_stored_pass_rates_give_lengths_and_wasted_groups(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By hand, for K = 4: 1, 2 / 16, 1 and (81 + 1) / 256 of the groups have equal rewards."""
    path = tmp_path / "rates.jsonl"
    file = ProfileFile(path, ProfileKey("weights", "template", {}, {}))
    for n, (solved, tokens) in enumerate([(8, 100), (4, 200), (0, 300), (6, 400)]):
        rewards = (1.0,) * solved + (0.0,) * (8 - solved)
        file.add(Measurement(f"k{n}", f"k{n}", 0, solved, rewards, 0, 60, 8 * tokens))
    file.close()
    flags = ["--data.curriculum.every", "10", "--rollout.samples_per_prompt", "4"]
    flags += ["--data.curriculum.profile", str(path)]
    wasted = (1 + 2 / 16 + 1 + 82 / 256) / 4
    found = json.loads(page(capsys, "gsm8k", "--gpus", "1xL4", "--json", *flags))
    assert found["groups"]["equal_rewards"] == pytest.approx(wasted)
    assert (found["groups"]["pass_rate"], found["groups"]["tasks_measured"]) == (18 / 32, 4)
    assert (found["work"]["mean_tokens"], found["work"]["prompt_tokens"]) == (250, 60)
    text = page(capsys, "gsm8k", "--gpus", "1xL4", *flags)
    assert "61.1% of groups" in text and f"{1 / (1 - wasted):.2f} x as much" in text
    given = ["--pass-rate", "0.5", "--length", "100"]
    found = json.loads(page(capsys, "gsm8k", "--gpus", "1xL4", "--json", *given, *flags))
    assert found["groups"]["equal_rewards"] == 1 / 8 and found["work"]["mean_tokens"] == 100
    assert main(["explain", "gsm8k", *flags, "--algorithm.dynamic_sampling", "2"]) == 0
    text = capsys.readouterr().out
    assert "solved in 56% of the samples, with 250 tokens" in text
    assert f"{wasted * 64:.0f} of 64 samples of a step, or {wasted * 64 * 250:,.0f} tokens" in text
    assert f"{wasted:.2f} more groups" in text and f"a share of {wasted**2:.3f} stays" in text
    error = refused(capsys, "gsm8k", *flags[:-1], str(tmp_path / "none.jsonl"))
    assert "none.jsonl" in error


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
    text = page(capsys, "70B", "--gpus", "64xH100", "--algorithm.beta", "0.01", code=CANNOT)
    found = [title for title in SECTIONS if re.search(f"^{title}", text, re.M)]
    assert found == SECTIONS
    assert "weights 35.3 GB" in text and "18 devices hold the training state" in text
    assert re.search(r"verdict +does not fit: .* too much", text)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_sync_in_fp8_is_cast_first_and_sends_half(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, tax = {}, {}
    flags = ("--algorithm.correction", "truncated", "--sync.kind")
    for kind in ("copy", "fp8"):
        text = " ".join(page(capsys, "70B", "--gpus", "64xH100", *flags, kind, code=CANNOT).split())
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
    text = " ".join(page(capsys, "Qwen2.5-7B", "--gpus", "8xH100", code=WITH_SETTINGS).split())
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
    text = page(capsys, "7B", "--gpus", "1xRTX 4090", code=CANNOT)
    assert "does not fit" in text
    assert "trainer.optimizer = 'adamw8bit'" in " ".join(text.split())


def test_a_model_folder_and_its_config_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    folder = page(capsys, str(QWEN), "--gpus", "8xA100")
    config = page(capsys, str(QWEN / "config.json"), "--gpus", "8xA100")
    words = [text.partition("GB each)")[2].split() for text in (folder, config)]
    assert words[0] == words[1]
    assert "0.494 billion parameters; sizes from its config.json" in folder


def test_the_shipped_small_recipes_have_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model from scratch" in page(capsys, "demo", "--gpus", "L4")
    assert "not for adapters" in page(capsys, "gsm8k_lora_7b", "--gpus", "4xL4")


def test_a_stage_has_a_plan_if_it_is_of_kind_rl(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model from scratch" in page(capsys, "rlhf:ppo", "--gpus", "L4")
    assert "rlhf:judge is of kind reward_model, and" in refused(capsys, "rlhf:judge")
    assert "no stage 'ppp'. Did you mean 'ppo'?" in refused(capsys, "rlhf:ppp")
    assert "name one of them" in refused(capsys, "rlhf")


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
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "vocab_size": 50}', encoding="utf-8")
    told = refused(capsys, str(tmp_path))
    assert "lacks sizes: hidden_size, num_attention_heads" in told and "vocab_size" not in told
    config.write_text('{"model_type": "mamba", "hidden_size": 64}', encoding="utf-8")
    assert "model_type = 'mamba'" in refused(capsys, str(tmp_path))
    unknown = make_plan(load_recipe("gsm8k", ["--model.path", str(tmp_path)]))
    assert "model_type = 'mamba'" in memory_lines(unknown)[0][0]
    config.write_text("[]", encoding="utf-8")
    assert "must hold a JSON object" in refused(capsys, str(tmp_path))
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


def together(text: str) -> list[str]:
    """Flags of the settings that the first lines name."""
    found = re.search(r"these settings together: (.*?)\. ", " ".join(text.split()))
    assert found
    return found[1].split()


@pytest.mark.parametrize(
    ("target", "gpus"), [("Qwen2.5-7B", "8xH100"), ("7B", "1xH100"), ("14B", "1xB200")]
)
def test_with_the_named_settings_together_it_runs(
    capsys: pytest.CaptureFixture[str], target: str, gpus: str
) -> None:
    """The settings are enough, and none of them can be left out."""
    flags = together(page(capsys, target, "--gpus", gpus, code=WITH_SETTINGS))
    text = page(capsys, target, "--gpus", gpus, *flags)
    assert text.startswith("Sixfold runs this.")
    pairs = list(zip(flags[::2], flags[1::2], strict=True))
    for left_out in pairs:
        fewer = [word for pair in pairs if pair != left_out for word in pair]
        try:
            assert main(["plan", target, "--gpus", gpus, *fewer]) != 0
        finally:
            capsys.readouterr()


def test_time_and_cost_are_those_of_the_run_with_the_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("7B", "--gpus", "1xH100")
    first = page(capsys, *words, code=WITH_SETTINGS)
    said = re.findall(r"100 steps in .*? US dollars", first)
    assert len(said) == 2 and said[0] == said[1]
    then = page(capsys, *words, *together(first))
    assert said[0] in then


def test_a_plan_that_cannot_run_says_why_and_has_no_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys, "70B", "--gpus", "64xH100", code=CANNOT)
    first = " ".join(text.split("\n\n")[0].split())
    assert first.startswith("Sixfold cannot run this, because each device needs")
    # Float32 and bfloat16, 4 and 2 bytes per parameter that every rank holds.
    assert "each rank holds a float32 sync copy (282.2 GB)" in first
    assert "a whole copy of the weights for its engine (139.0 GB)" in first
    assert "An adapter would fit: --model.lora.rank" in first
    assert "US dollars" not in text and "recommended" not in text and "steps in" not in text
    flags = re.findall(r"An adapter would fit: (.*?)\.$", first)[0].split()
    page(capsys, "70B", "--gpus", "64xH100", *flags)


def test_what_sixfold_cannot_run_whatever_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not run on TPUs" in page(capsys, "gsm8k", "--gpus", "8xTPU v5p", code=CANNOT)
    flags = ("--trainer.weights", "bfloat16")
    text = page(capsys, "7B", "--gpus", "8xH200", *flags, code=CANNOT)
    assert text.startswith("Sixfold cannot run this, because trainer.weights must be 'float32'")
    text = page(capsys, "70B", "--gpus", "1xL4", code=CANNOT)
    assert text.startswith("Sixfold cannot run this") and "Work of a step" not in text


def test_parts_of_the_memory_add_up_to_the_printed_sum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, code in (
        (("70B", "--gpus", "64xH100"), CANNOT),
        (("gsm8k", "--gpus", "1xL4"), 0),
        (("gsm8k_lora_7b", "--gpus", "4xL4"), 0),
        (("Qwen2.5-7B", "--gpus", "8xH100", "--engine.release_kv", "true"), 0),
        (("demo", "--gpus", "1xH100"), 0),
    ):
        text = page(capsys, *words, code=code)
        memory = re.split(r"^Memory of each.*$", text, flags=re.M)[1].partition("at most")[0]
        rows = re.findall(r"^  .{26}([\d.]+) ([GM]B)", memory, re.M)
        sums = [i for i, line in enumerate(memory.splitlines()[1:]) if "needed at least" in line]
        tenths = [round(float(number) * 10) for number, _ in rows]
        assert len({unit for _, unit in rows[: sums[0] + 1]}) == 1
        assert sum(tenths[: sums[0]]) == tenths[sums[0]], words
        for line in re.findall(r"state [\d.]+ GB \+ .*? = [\d.]+", " ".join(text.split())):
            *parts, total = [round(float(n) * 10) for n in re.findall(r"[\d.]+(?= GB|$)", line)]
            assert sum(parts) == total


@pytest.mark.parametrize(
    ("number", "model"),
    [("0.5B", "Qwen2.5-0.5B"), ("1B", "Llama-3.2-1B"), ("32B", "Qwen3-32B"), ("8B", "Llama-3-8B")],
)
def test_a_number_of_parameters_is_the_nearest_public_model(
    capsys: pytest.CaptureFixture[str], number: str, model: str
) -> None:
    texts = []
    for target in (number, model):
        main(["plan", target, "--gpus", "8xH200", "--json"])
        texts.append(json.loads(capsys.readouterr().out))
    for key in ("model", "memory", "topologies", "work"):
        assert texts[0][key] == texts[1][key]
    assert f"{number} is {model}, the nearest public model" in texts[0]["assumed"]


def test_a_number_far_from_all_models_keeps_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "100B", "--gpus", "8xH200", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["parameters"] == 100_000_000_000
    assert "100B has the shape of Qwen2.5-72B, the nearest public model" in found["assumed"]


@pytest.mark.parametrize("columns", [40, 80])
def test_the_page_keeps_to_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = page(capsys, "gsm8k", "--gpus", "2xL4", "--simulate", "2")
    # A setting or a command is not broken.
    assert [line for line in text.splitlines() if len(line) > columns and " " in line.strip()] == []
