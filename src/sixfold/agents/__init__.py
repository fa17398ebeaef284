"""Agents: programs that speak to an OpenAI-compatible endpoint, and are trained unchanged.

Every episode is a session with a base URL of its own (`endpoint`). The agent is a program or a
Python function (`command`, `function`). Its requests become trajectories (`session`) with the
tokens that were sampled. `player` puts these together for the driver of a rollout.
"""
