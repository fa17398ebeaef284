"""Isolation of programs that a model has written.

`sandbox.py` runs jobs. Each job gets a cell: a single-use process in namespaces of its own.
`job.py` has the types. `isolation.py` finds out what the machine can enforce. `launcher.py` is a
small process that starts and ends cells, `agent.py` the first program in a cell.
"""
