"""Training loop: calls the roles in order and counts the steps.

The loop itself computes no log-probs, rewards or parameter updates.
"""
