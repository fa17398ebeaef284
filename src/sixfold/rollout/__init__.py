"""Rollout: policy -> trajectories, with the log-prob of every sampled token captured as it is sampled. It never sees a reward."""
