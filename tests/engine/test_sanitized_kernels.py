"""No compiled kernel touches memory that is not its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sanitizer import run_sanitized

TESTS = Path(__file__).parents[1]
CHOSEN = {
    TESTS / "engine/test_cpu_kernels.py": (
        "any_attention or shared_blocks or 96 or 127 or greedy or logp_nan"
    ),
    TESTS / "model/test_body_kernels.py": "product or packed or 257 or 96 or far_out",
    TESTS / "sync/test_quantise.py": "fused_pass",
    TESTS / "trainer/test_tiled_head.py": "frozen_head or not_finite",
    TESTS / "model/test_fused_decoder.py": "all_layers_in_one_call and 2-qwen3",
}


@pytest.mark.nightly
@pytest.mark.slow
def test_no_kernel_touches_memory_that_is_not_its_own(tmp_path: Path) -> None:
    """Tests of the kernels once more, on copies that check every access. All in one process."""
    run_sanitized(CHOSEN, ["kernels", "body", "head", "round"], tmp_path)
