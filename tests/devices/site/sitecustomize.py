"""Make the fake device known in a child process: Python imports this file at its start, if its
folder is on the path.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from fused_kernels import register_gpu

register_gpu()
