"""Rollout: sample trajectories from the policy.

The log-prob of every token is recorded when the token is sampled. Rollout does not know rewards.
`renderer/` converts messages to tokens and tokens to text.
"""
