"""Use a stand-in for verifiers if the library is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("verifiers") is None:
    sys.path.append(str(Path(__file__).parent / "stand_in"))
