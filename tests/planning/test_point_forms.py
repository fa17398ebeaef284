"""Forms that a row of published measurements may have: numbers, files, names and gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.page.points import Outcome, outcomes, read_number, read_points
from sixfold_planning.published import TEXTS, NotPredictable, Point, Prediction, device_of, predict

PLAIN = (
    "id,framework,model,workload,gpu,n_gpus,max_len,tokens_s_gpu\n"
    "X1,torchtitan FSDP+compile,Llama-3.1-8B,pretrain,H100,1024,8192,7000\n"
)
TRAINING = {
    "framework": "Megatron-LM",
    "model": "GPT 175B",
    "workload": "pretrain",
    "gpu": "A100",
}
RL = {"framework": "Foo", "model": "Qwen2.5-7B", "workload": "RL step", "gpu": "H100"}


def row(texts: dict[str, str], **inputs: float) -> Point:
    return Point(dict.fromkeys(TEXTS, "") | texts, inputs, {}, (), {})


def predicted(texts: dict[str, str], **inputs: float) -> Prediction:
    return predict(row(texts, **inputs), CONSTANTS)


def read(path: Path, text: str) -> list[Outcome]:
    path.write_text(text, encoding="utf-8")
    return outcomes(read_points(path), CONSTANTS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("1.5e3", 1500),
        (".5", 0.5),
        ("1,024", 1024),
        ("30,840,000", 30_840_000),
        ("1,234.5", 1234.5),
        ("43%", 43),
        ("43.5 %", 43.5),
        ("~1,200", 1200),
        ("≈ 12", 12),
        ("16K", 16384),
        ("32k tokens", 32768),
        ("16M tokens", 16e6),
        ("1.46M", 1.46e6),
        ("12,34", None),
        ("10-12", None),
        ("8 or 16", None),
        ("3.67x", None),
        ("", None),
    ],
)
def test_a_number_is_read_as_it_is_usually_written(text: str, value: float | None) -> None:
    assert read_number(text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + PLAIN,
        PLAIN.replace("\n", "\r\n"),
        "# rows of a paper\n\n" + PLAIN + "\n,,,,,,,\n# X2,a,b,c\n",
        PLAIN.replace(",1024,", ',"1,024",').replace("7000", '"~7,000"'),
        PLAIN.replace("8192", "8K"),
        PLAIN.replace("gpu,", "GPU ,").replace("id,", " Id,"),
        PLAIN.replace("tokens_s_gpu\n", "tokens_s_gpu,url\n").replace("7000\n", "7000,a,b,c\n"),
        PLAIN.replace("tokens_s_gpu\n", "tokens_s_gpu,avg_len,mfu_pct\n"),
        PLAIN.replace("tokens_s_gpu\n", "tokens_s_gpu,avg_len,mfu_pct\n").replace(
            "7000\n", "7000,nan,n/a\n"
        ),
        "max_len,tokens_s_gpu,gpu,n_gpus,workload,model,framework,id\n"
        "8192,7000,H100,1024,pretrain,Llama-3.1-8B,torchtitan FSDP+compile,X1\n",
        PLAIN.replace("7000", "6000-8000"),
        PLAIN.replace("7000", "6500 – 7500"),
    ],
)
def test_the_form_of_a_file_does_not_change_its_rows(tmp_path: Path, text: str) -> None:
    (plain,) = read(tmp_path / "plain.csv", PLAIN)
    (found,) = read(tmp_path / "rows.csv", text)
    assert (found.predicted, found.published) == (plain.predicted, 7000)
    assert found.leads and found.predicted is not None


def test_the_line_of_a_wrong_number_counts_comments_and_empty_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("# a comment\n\n" + PLAIN.replace("7000", "-7000"))
    assert main(["plan", "--points", str(path)]) == 2
    assert "line 4: tokens_s_gpu = '-7000'" in capsys.readouterr().err


def test_a_repeated_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(PLAIN.replace("gpu\n", "gpu,n_gpus\n").replace("7000\n", "7000,8\n"))
    assert main(["plan", "--points", str(path)]) == 2
    assert "column 'n_gpus' occurs 2 times" in capsys.readouterr().err


def test_a_row_without_published_values_shows_its_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAIN.replace(",7000", ",")
    (plain,) = read(tmp_path / "plain.csv", PLAIN)
    found = {o.quantity: o for o in read(tmp_path / "rows.csv", text)}
    assert found["tokens_s_gpu"].predicted == plain.predicted
    assert all(o.error is None and not o.leads for o in found.values())
    assert main(["plan", "--points", str(tmp_path / "rows.csv"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert {v["quantity"] for v in values} == set(found)
    assert all(v["published"] is None and v["error"] is None for v in values)


def test_a_published_text_beside_a_number_has_a_reason(tmp_path: Path) -> None:
    text = PLAIN.replace("gpu\n", "gpu,mfu_pct\n").replace("7000\n", "7000,about half\n")
    speed, share = read(tmp_path / "rows.csv", text)
    assert speed.leads and speed.predicted is not None
    assert share.quantity == "mfu_pct" and share.predicted is None and "text" in share.reason


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("8xH100", "H100"),
        ("DGX H100", "H100"),
        ("H100-80G", "H100"),
        ("A100-SXM4-80GB", "A100"),
        ("A100 80GB (400/350 W)", "A100"),
        ("H100-PCIE-80GB", "H100 PCIe"),
        ("GB200 NVL72", "GB200"),
        ("V100 32GB", "V100"),
    ],
)
def test_spellings_of_a_gpu(spelling: str, name: str) -> None:
    assert device_of(row({"gpu": spelling})).name == name


def test_two_gpus_in_one_cell_are_not_guessed() -> None:
    with pytest.raises(NotPredictable, match="H100 / H200"):
        device_of(row({"gpu": "H100 / H200"}))


@pytest.mark.parametrize(
    ("workload", "trains"),
    [
        ("pretrain 15T tokens", True),
        ("continued pre-training", True),
        ("LoRA fine-tuning", True),
        ("full SFT", True),
        ("RL step", False),
        ("RL step from an SFT model", False),
        ("GRPO", False),
        ("async RL", False),
        ("RLHF iteration", False),
    ],
)
def test_a_workload_is_training_or_a_step(workload: str, trains: bool) -> None:
    values = predicted(RL | {"workload": workload}, n_gpus=8.0).values
    assert ("mfu_pct" in values) is trains and ("train_s" in values) is not trains


def test_a_workload_without_a_rule_says_so() -> None:
    with pytest.raises(NotPredictable, match="single-sequence decode"):
        predicted(RL | {"workload": "single-sequence decode"}, n_gpus=8.0)


def test_a_model_of_no_parameters_says_so() -> None:
    with pytest.raises(NotPredictable, match="params_b = 0"):
        predicted(RL | {"model": "Foo-0B"}, n_gpus=8.0)


def test_a_pipeline_without_a_batch_has_four_micro_batches_per_stage() -> None:
    texts = TRAINING | {"framework": "verl (Megatron)", "workload": "RL training phase"}
    speed = predicted(texts, n_gpus=64.0, train_pp=4.0).values["tokens_s_gpu"]
    many = predicted(texts, n_gpus=64.0, train_pp=4.0, micro_batch=1e6).values["tokens_s_gpu"]
    # 16 micro-batches take the time of 16 + 4 - 1.
    assert speed / many == pytest.approx(16 / 19, rel=1e-4)


def test_a_replica_takes_its_part_of_the_batch_at_once() -> None:
    sizes = {"n_gpus": 64.0, "train_tp": 8.0, "max_len": 2048.0, "train_gbs": 64.0}
    texts = TRAINING | {"framework": "metaseq"}
    usual = predicted(texts, **sizes).values["step_s"]
    # 64 sequences over 64 / 8 replicas.
    assert usual == predicted(texts, **sizes, micro_batch=8.0).values["step_s"]
    assert usual < predicted(texts, **sizes, micro_batch=1.0).values["step_s"]


def test_any_pretraining_engine_is_as_fast_as_megatron() -> None:
    sizes = {"n_gpus": 1024.0, "train_tp": 8.0, "train_pp": 8.0, "train_gbs": 1024.0}
    other = predicted(TRAINING | {"framework": "MegaScale"}, **sizes).values["step_s"]
    assert other == predicted(TRAINING, **sizes).values["step_s"]


@pytest.mark.parametrize("source", ["arXiv:2505.24298", "AReaL blog"])
def test_areal_samples_512_x_16_in_every_document(source: str) -> None:
    texts = RL | {"source": source, "framework": "AReaL"}
    values = predicted(texts, n_gpus=64.0, max_len=2000.0, avg_len=890.0).values
    # 890 sampled tokens and a prompt of 110.
    sequences = values["tokens_s_gpu"] * 64 * values["step_s"] / 1000
    assert sequences == pytest.approx(512 * 16)
