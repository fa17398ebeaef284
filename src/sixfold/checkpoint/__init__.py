"""Checkpoints: what they hold, how they are written, verified, listed, kept and read."""
