"""Child processes that answer requests over a private pipe.

`child.py` is the parent's side, `program.py` the child's. Three things use them: the processes that
check answers, the reference in a process, and vLLM.
"""
