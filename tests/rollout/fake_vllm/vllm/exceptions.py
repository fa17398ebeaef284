"""vllm.exceptions"""

from __future__ import annotations


class VLLMValidationError(Exception):
    """As in vLLM 0.32, this is not a ValueError."""
