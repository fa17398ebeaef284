"""Families of models. A judge tends to prefer texts of its own family."""

from __future__ import annotations

import json
import re
from pathlib import Path

_FAMILIES = {
    "qwen": r"qwen|qwq",
    "llama": r"llama|vicuna|alpaca|tulu",
    "mistral": r"mistral|mixtral|ministral|codestral|magistral",
    "gemma": r"gemma",
    "gemini": r"gemini",
    "phi": r"\bphi[-_]?\d|\bphi\b",
    "deepseek": r"deepseek",
    "gpt": r"\bgpt|chatgpt|\bo[134]\b|\bo[134]-",
    "claude": r"claude",
    "glm": r"\bglm|chatglm",
    "olmo": r"olmo",
    "smollm": r"smollm",
    "granite": r"granite",
    "falcon": r"falcon",
    "cohere": r"command-?[ra]|cohere|aya",
    "kimi": r"kimi|moonshot",
    "grok": r"grok",
    "nemotron": r"nemotron",
    "minicpm": r"minicpm",
    "internlm": r"internlm",
    "yi": r"\byi[-_]",
}
"""Label -> pattern in the name of a model.

The first match counts: DeepSeek-R1-Distill-Qwen is a Qwen model.
"""


def family_of(model: str) -> str:
    """Label of a model's family, from its name or its config.json. "" if it is unknown.

    Args:
        model: name, hub id or folder.
    """
    if not model:
        return ""
    name = Path(model).name if Path(model).is_dir() else model
    for label, pattern in _FAMILIES.items():
        if re.search(pattern, name, re.IGNORECASE):
            return label
    config = Path(model) / "config.json"
    if not config.is_file():
        return ""
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type", "")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return next((label for label, p in _FAMILIES.items() if re.search(p, str(kind))), str(kind))


def same_family(judge: str, policy: str) -> str:
    """A warning if judge and policy belong to the same family, otherwise ""."""
    if not judge or judge.casefold() != policy.casefold():
        return ""
    return (
        f"judge and policy both belong to the family '{judge}'. Judges tend to prefer texts of"
        " their own family. Compare with a judge of another family (environment.judge.model)"
    )
