"""Make the fake device known in a child process: Python imports this file at its start, if its
folder is on the path.
"""

import sys
from pathlib import Path

# Processes that check answers use no torch, and importing it takes longer than their checks.
if not any(word.startswith("sixfold.environment") for word in sys.orig_argv):
    sys.path.append(str(Path(__file__).parents[1]))

    from fused_kernels import register_gpu

    register_gpu()
