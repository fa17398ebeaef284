"""Seventeen concepts that an introductory course leaves out: where each belongs."""

from __future__ import annotations

from dataclasses import dataclass

from .lab import Breaking, Control, Lab, Outcome, Table

CHAPTERS = {
    "02": "Rollout",
    "03": "Reward and reference",
    "04": "Algorithm interface",
    "06": "Weight sync",
    "10": "PPO",
    "13": "DAPO",
    "14": "Dr. GRPO",
    "15": "RLHF",
    "17": "Process rewards and search",
    "18": "Environments and verifiers",
    "18a": "Data pipelines and curation",
    "19": "System topology",
    "20": "KV cache",
    "22": "Memory and throughput",
    "23": "Recipes and failures",
    "25": "Kernels",
}
"""Chapters of the course that the concepts refer to, in its order."""

LAST_CHAPTER = 28


@dataclass(frozen=True)
class Concept:
    """A concept that is missing from the course.

    Attributes:
        force: "signal", "estimator" or "cost": the force of RL training that it belongs to.
        after: chapter that it follows, a key of CHAPTERS.
        prerequisites: chapters that it needs.
        effort: "small", "medium" or "large".
        text: what it is, one sentence.
        module: file of this package that has it, or "".
        section: number that the course proposes for it, or "".
        rated_by_us: the course gives no effort; it is our estimate.
    """

    force: str
    after: str
    prerequisites: tuple[str, ...]
    effort: str
    text: str
    module: str
    section: str = ""
    rated_by_us: bool = False


CONCEPTS = {
    "process-reward-training": Concept(
        "signal",
        "17",
        ("03", "17"),
        "medium",
        "Train on rewards per step: label prefixes by the success rate of their continuations.",
        "algorithm/returns.py",
        section="27.1",
    ),
    "reward-model-internals": Concept(
        "signal",
        "15",
        (),
        "small",
        "Heads on the last or the mean token, ensembles with pessimism, and a length debias.",
        "",
        section="15.5",
    ),
    "curriculum": Concept(
        "signal",
        "18a",
        (),
        "medium",
        "Mix data sources, order tasks by difficulty and keep good samples between two stages.",
        "data/sources.py",
    ),
    "ai-feedback": Concept(
        "signal",
        "15",
        (),
        "medium",
        "A judge scores by written principles; drafts are criticised and revised.",
        "environment/judge/constitution.py",
        section="15.7",
    ),
    "verifier-robustness": Concept(
        "signal",
        "18",
        (),
        "medium",
        "Attack the verifier, and hold a stricter one back to detect reward hacking.",
        "environment/audit/exploits.py",
        rated_by_us=True,
    ),
    "sandbox": Concept(
        "signal",
        "18",
        (),
        "medium",
        "Run model code with system-call filters, no network, temporary files and a warm pool.",
        "environment/sandbox/sandbox.py",
        rated_by_us=True,
    ),
    "gae": Concept(
        "estimator",
        "10",
        ("04", "10"),
        "small",
        "A = sum (gamma lambda)^k delta_(t+k): lambda trades bias (0, TD) for variance (1, MC).",
        "algorithm/returns.py",
        section="10.5",
    ),
    "kl-estimators": Concept(
        "estimator",
        "03",
        (),
        "small",
        "k1 = r, k2 = r^2 / 2 and k3 = exp(-r) + r - 1, with r = log pi - log pi_ref.",
        "algorithm/kl.py",
        section="03.5",
    ),
    "entropy-bonus": Concept(
        "estimator",
        "13",
        (),
        "small",
        "Reward entropy directly, and compare that with a KL to the reference.",
        "algorithm/entropy.py",
        section="13.5",
    ),
    "off-policy-correction": Concept(
        "estimator",
        "19",
        ("02", "10"),
        "medium",
        "Replay old samples with importance weights, or with V-trace.",
        "algorithm/off_policy.py",
        section="19.5",
    ),
    "reward-whitening": Concept(
        "estimator",
        "14",
        (),
        "small",
        "Scale rewards by running statistics per source and clip outliers.",
        "algorithm/shaping.py",
    ),
    "fp8": Concept(
        "cost",
        "22",
        (),
        "medium",
        "Sample with E4M3 weights and a scale per tensor, and recompute log-probs exactly.",
        "sync/quantise.py",
    ),
    "mixture-of-experts": Concept(
        "cost",
        "22",
        ("22", "25"),
        "large",
        "Routers drift between sampler and trainer; experts need all-to-all and a balanced load.",
        "engine/routes.py",
    ),
    "kv-offload": Concept(
        "cost",
        "20",
        (),
        "small",
        "Move blocks of the KV cache that are not in use to host memory.",
        "engine/offload.py",
    ),
    "interconnect": Concept(
        "cost",
        "25",
        (),
        "small",
        "NVLink inside a node and InfiniBand between nodes decide where to split a model.",
        "planning/collectives.py",
        rated_by_us=True,
    ),
    "checkpointing": Concept(
        "cost",
        "23",
        ("19", "22"),
        "medium",
        "Save weights, optimizer, engine snapshot, version and queue, and recover from them.",
        "checkpoint/checkpoint.py",
        section="28.5",
    ),
    "multi-lora": Concept(
        "cost",
        "20",
        ("06", "20"),
        "medium",
        "Serve many adapters on one base model, with versions and matching log-probs for each.",
        "engine/adapters.py",
    ),
}


def chapter_title(key: str) -> str:
    """`17 Process rewards and search`."""
    return f"{key} {CHAPTERS[key]}"


def missing_chapters(concept: Concept, read: int) -> list[str]:
    """Prerequisites, and the chapter before, that come after chapter `read`."""
    needed = sorted({*concept.prerequisites, concept.after})
    return [chapter_title(key) for key in needed if int(key[:2]) > read]


def concept_gaps(*, concept: str, read: int) -> Outcome:
    """Describe one concept.

    Args:
        concept: key of CONCEPTS.
        read: last chapter of the course that has been read.
    """
    found = CONCEPTS[concept]
    missing = missing_chapters(found, read)
    rows = [[key, each.force, each.after, each.effort] for key, each in CONCEPTS.items()]
    return Outcome(
        values={
            "slots_after": chapter_title(found.after),
            "section": found.section or None,
            "prerequisites": [chapter_title(key) for key in found.prerequisites],
            "force": found.force,
            "effort": found.effort,
            "effort_is_our_estimate": found.rated_by_us,
            "text": found.text,
            "module": f"sixfold/{found.module}" if found.module else None,
            "missing_chapters": missing,
        },
        tables=(Table("Concepts", ("concept", "force", "after", "effort"), rows),),
        lines=(found.text,),
    )


CONCEPT_GAPS = Lab(
    name="concept-gaps",
    title="Seventeen concepts beyond an introductory course: where each fits in",
    about=(
        "Each concept belongs to one force of RL training (signal, estimator or cost), follows a"
        " chapter of the course and may need others. `module` is the file of Sixfold that has it."
        " The course rates the effort of 14 concepts; those of verifier-robustness, sandbox and"
        " interconnect are our estimates. V-trace is part of off-policy-correction."
    ),
    controls=(
        Control("concept", "gae", "concept", choices=tuple(CONCEPTS)),
        Control("read", LAST_CHAPTER, "last chapter that has been read", low=0, high=LAST_CHAPTER),
    ),
    run=concept_gaps,
    breaking=Breaking(
        breaks={"concept": "mixture-of-experts", "read": 10},
        safe={"concept": "mixture-of-experts", "read": 25},
        why="Its prerequisites, chapters 22 and 25, have not been read.",
        failed=lambda outcome: bool(outcome.values["missing_chapters"]),
    ),
)

LABS = (CONCEPT_GAPS,)
