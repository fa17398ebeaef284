"""Rewards for the text of a completion: its format, its length, its language, and short answers."""
