"""Training of existing agents: programs that send requests to an OpenAI-compatible endpoint.

Each episode is a session of the endpoint with its own base URL (`endpoint`). The agent is a program
(`command`) or a Python function (`function`). The requests of a session become trajectories with
the sampled tokens (`session`). `player` runs the agent for the driver of a rollout.
"""
