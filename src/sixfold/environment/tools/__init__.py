"""Tools: functions that the policy may call in an episode.

`tool.py` makes a tool from a function. `episode.py` has the episode that runs the calls.
"""
