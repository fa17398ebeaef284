"""vllm.exceptions"""

from __future__ import annotations


class VLLMValidationError(Exception):
    """Not a ValueError, as in vLLM 0.32."""
