"""Labs: small simulators of one idea each, for `sixfold lab NAME` and for Python.

`lab.py` holds the types, `catalogue.py` the names. Every other module holds one lab or a few
closely related ones. No module imports torch or numpy when it is imported.
"""
