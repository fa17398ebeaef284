"""Reward for mathematics. `answers` compares a final answer with the reference answer."""
