"""Child processes that answer requests over a private pipe.

`child.py` is the parent's side, `program.py` the child's. The checker processes, the reference
worker and vLLM use them.
"""
