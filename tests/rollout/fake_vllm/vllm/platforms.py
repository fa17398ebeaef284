"""vllm.platforms"""

from __future__ import annotations


class _Cpu:
    def is_cpu(self) -> bool:
        return True


current_platform = _Cpu()
