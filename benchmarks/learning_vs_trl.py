"""GRPO learning, Sixfold beside TRL: the same weights, tasks, samples and steps; held-out accuracy
of both, seed by seed.

    # five seeds; writes the SVG beside the JSON
    python benchmarks/learning_vs_trl.py --json benchmarks/learning_vs_trl.json
    # one seed, four steps: a test of the script
    python benchmarks/learning_vs_trl.py --quick

Per seed: `sixfold sft demo` makes a base that solves a third of two-digit sums;
`sixfold train demo` and `learning_vs_trl_trl.py` (under the python of `.venv-trl`) each train that
base by GRPO; `learning_vs_trl_replay.py` trains it a third time, on the samples that TRL drew; and
`learning_vs_trl_evaluate.py` evaluates the weights that all of them left at every checkpoint,
greedily, on sums that neither SFT nor RL has seen. Each is a process of its own on one thread;
`--jobs` seeds run at a time.

What is not left to trust: both sides report, for every step, the ids of its tasks, the tokens of
its prompts, its learning rate and its number of samples (`StepRecord`), and the weights that TRL
loaded are evaluated before its first step. One difference ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from learning_vs_trl_report import differences, markdown, write
from peer_environment import trl_python

import sixfold

HERE = Path(__file__).resolve().parent
SAMPLES_PER_PROMPT = 8
TEMPERATURE = 1.0
SIDES = ("sixfold", "trl")


@dataclass(frozen=True)
class Job:
    """One seed's work, for both sides; the job file is this as JSON. folder: where all of it
    happens. checkpoint_every: in steps.
    """

    folder: str
    seed: int
    steps: int
    checkpoint_every: int
    prompts_per_step: int = 16
    max_new_tokens: int = 40
    learning_rate: float = 1.5e-4
    heldout: int = 1000
    sft_steps: int = 400  # at most: it ends once a third of a probe set is solved

    @classmethod
    def load(cls, path: Path) -> Job:
        """The job in the file at `path`."""
        return cls(**json.loads(path.read_text()))

    @property
    def checkpoints(self) -> list[int]:
        """The steps after which weights are kept; 0 is the base."""
        return [*range(0, self.steps, self.checkpoint_every), self.steps]

    @property
    def base(self) -> Path:
        """The model that both sides load, in Hugging Face form."""
        return self.weights("base", 0)

    @property
    def trl(self) -> Path:
        """TRL's output directory."""
        return Path(self.folder, "trl")

    @property
    def tasks(self) -> Path:
        """The tasks of all steps in the order in which they are trained, a JSON object a line: id,
        prompt, answer.
        """
        return Path(self.folder, "tasks.jsonl")

    @property
    def trl_samples(self) -> Path:
        """Samples of TRL, one step per line, as JSON: tasks, completions (token ids) and rewards,
        one entry per sample.
        """
        return self.trl / "samples.jsonl"

    def weights(self, run: str, step: int) -> Path:
        """The model that "base", "sixfold", "trl" or "replay" had after `step` steps."""
        name = f"step-{step:06d}"
        return (
            Path(self.folder, run, "checkpoints", name, "model")
            if run in ("base", "sixfold")
            else Path(self.folder, run, name)
        )

    def read_tasks(self) -> list[dict[str, Any]]:
        """The rows of the task file."""
        return [json.loads(line) for line in self.tasks.read_text().splitlines()]

    def flags(self) -> list[str]:
        """Changes of the job to the recipe `demo`, as command-line flags. Held-out tasks and task
        order follow from run.seed.
        """
        settings = {
            "run.dir": self.folder,
            "run.seed": self.seed,
            "run.steps": self.steps,
            "run.threads": 1,
            "run.max_minutes": 0,
            "run.target_reward": 0,
            "data.heldout": self.heldout,
            "environment.preflight": 0,
            "rollout.prompts_per_step": self.prompts_per_step,
            "rollout.samples_per_prompt": SAMPLES_PER_PROMPT,
            "rollout.max_new_tokens": self.max_new_tokens,
            "rollout.temperature": TEMPERATURE,
            "trainer.learning_rate": self.learning_rate,
            "trainer.schedule": "linear",
            "trainer.warmup_steps": 0,  # the sides count warm-up from 1 and from 0
            "checkpoint.every": self.checkpoint_every,
            "checkpoint.keep": len(self.checkpoints),
            "eval.every": 0,
        }
        return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


@dataclass(frozen=True)
class StepRecord:
    """Record of one step of a side. prompts: token ids, one list per task. reward, length: means
    over the samples. seconds: wall time.
    """

    step: int
    tasks: list[str]
    prompts: list[list[int]]
    learning_rate: float
    reward: float
    length: float
    samples: int
    seconds: float


def run_seed(job: Job, trl: str) -> dict[str, Any]:
    """Both sides and the replay on one seed, and what came out: a row of the JSON file's
    `seeds`.
    """
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    path = folder / "job.json"
    path.write_text(json.dumps(asdict(job)))
    command = str(Path(sys.executable).with_name("sixfold"))
    call(
        [
            command,
            "sft",
            "demo",
            *job.flags(),
            "--run.name",
            "base",
            "--sft.steps",
            str(job.sft_steps),
        ]
    )
    call([sys.executable, str(HERE / "learning_vs_trl_evaluate.py"), "tasks", str(path)])
    call(
        [
            command,
            "train",
            "demo",
            *job.flags(),
            "--run.name",
            "sixfold",
            "--sft.steps",
            "0",
            "--model.path",
            str(job.base),
        ]
    )
    source = {"PYTHONPATH": str(Path(sixfold.__file__).parent.parent)}
    theirs = [
        StepRecord(**line)
        for line in call([trl, str(HERE / "learning_vs_trl_trl.py"), str(path)], source)
    ]
    replayed = call([sys.executable, str(HERE / "learning_vs_trl_replay.py"), str(path)])
    lines = call([sys.executable, str(HERE / "learning_vs_trl_evaluate.py"), "evaluate", str(path)])
    ours = [StepRecord(**line["record"]) for line in lines if "record" in line]
    check_same(job, ours, theirs)
    curves = {
        side: [(line["step"], line["accuracy"]) for line in lines if line.get("side") == side]
        for side in (*SIDES, "replay")
    }
    if curves["sixfold"][0] != curves["trl"][0]:
        raise SystemExit(
            f"seed {job.seed}: the sides did not start from the same weights:"
            f" {curves['sixfold'][0]} and {curves['trl'][0]}"
        )
    sides = {
        side: summarize(curves[side], steps)
        for side, steps in zip(SIDES, (ours, theirs), strict=True)
    }
    return {
        "seed": job.seed,
        **sides,
        "replay": {
            "curve": curves["replay"],
            "distance": [(r["step"], r["distance"]) for r in replayed],
        },
    }


def call(command: list[str], extra: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run a process on one thread; the JSON lines it printed. One that fails ends the benchmark
    with its last words.
    """
    environment = (
        os.environ
        | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        | (extra or {})
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def check_same(job: Job, ours: Sequence[StepRecord], theirs: Sequence[StepRecord]) -> None:
    """End the benchmark unless both sides took the same steps on the same prompts."""
    if not len(ours) == len(theirs) == job.steps:
        raise SystemExit(f"seed {job.seed}: {len(ours)} and {len(theirs)} steps of {job.steps}")
    for a, b in zip(ours, theirs, strict=True):
        for name in ("step", "tasks", "prompts", "samples"):
            if asdict(a)[name] != asdict(b)[name]:
                raise SystemExit(
                    f"seed {job.seed}, step {a.step}: {name} differ: {asdict(a)[name]} and"
                    f" {asdict(b)[name]}"
                )
        if abs(a.learning_rate - b.learning_rate) > 1e-9 * job.learning_rate:
            raise SystemExit(
                f"seed {job.seed}, step {a.step}: learning rates differ: {a.learning_rate} and"
                f" {b.learning_rate}"
            )


def summarize(curve: list[tuple[int, float]], steps: Sequence[StepRecord]) -> dict[str, Any]:
    """One side's row of a seed."""
    return {
        "curve": curve,
        "seconds": round(sum(s.seconds for s in steps), 1),
        "rewards": [round(s.reward, 4) for s in steps],
        "lengths": [round(s.length, 2) for s in steps],
    }


def describe(
    options: argparse.Namespace, job: Job, trl: str, seeds: list[dict[str, Any]]
) -> dict[str, Any]:
    """Everything that the JSON file holds."""
    packages = ("torch", "transformers")
    asked = (
        "import json; from importlib.metadata import version as v; print(json.dumps({p: v(p) for"
        f" p in {('trl', *packages)}}}))"
    )
    return {
        "date": date.today().isoformat(),
        "command": (
            f"python benchmarks/learning_vs_trl.py --seeds {','.join(map(str, options.seeds))}"
            f" --steps {options.steps}"
        ),
        "versions": {
            "sixfold": {name: version(name) for name in ("sixfold", *packages)},
            "trl": call([trl, "-c", asked])[0],
        },
        "settings": (
            {k: v for k, v in asdict(job).items() if k not in ("folder", "seed")}
            | {"samples_per_prompt": SAMPLES_PER_PROMPT}
        ),
        "difference": differences(seeds, *SIDES),
        "replay_difference": differences(seeds, "replay", "trl"),
        "seeds": seeds,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="GRPO learning, Sixfold beside TRL.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", default="0,1,2,3,4", help="seeds, by comma")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument(
        "--checkpoints",
        type=int,
        default=4,
        help="evaluations after the base, evenly spaced; the last is at the last step",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=Job.learning_rate,
        help="of both sides at the first step; it falls to 0 in a line",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="seeds at work at one time, one thread each"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, four steps: to see that it runs"
    )
    parser.add_argument(
        "--trl-python",
        default="",
        help="python of an environment that has TRL (default: .venv-trl, made when missing)",
    )
    parser.add_argument(
        "--folder",
        default="",
        help="work in this new folder and keep it (default: a temporary one)",
    )
    parser.add_argument(
        "--json",
        default="",
        help="write everything to this file, and the curves to an SVG beside it",
    )
    options = parser.parse_args(arguments)
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.quick:
        options.seeds, options.steps, options.checkpoints = options.seeds[:1], 4, 2
    if options.checkpoints < 1 or options.steps % options.checkpoints:
        parser.error(f"--checkpoints {options.checkpoints}: must divide --steps {options.steps}")
    return options


def main() -> None:
    """Run the seeds, print the tables, write the files."""
    options = parse()
    trl = options.trl_python or trl_python()
    smaller = {"heldout": 64, "sft_steps": 120} if options.quick else {}
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        root = Path(options.folder or temporary).resolve()
        every = options.steps // options.checkpoints
        jobs = [
            Job(
                str(root / f"seed-{s}"),
                s,
                options.steps,
                every,
                learning_rate=options.learning_rate,
                **smaller,
            )
            for s in options.seeds
        ]
        seeds = list(pool.map(lambda job: run_seed(job, trl), jobs))
    found = describe(options, jobs[0], trl, seeds)
    print(markdown(found))
    if options.json:
        write(found, Path(options.json))


if __name__ == "__main__":
    main()
