"""A run: from a recipe to checkpoints, logs and a report.

`start` is the entry point. `assemble` chooses the classes.
"""
