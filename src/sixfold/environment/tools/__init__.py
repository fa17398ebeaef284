"""Tools that the policy may call in an episode, and the episode that runs them.

`tool.py` makes a tool from a function, `episode.py` has the episode.
"""
