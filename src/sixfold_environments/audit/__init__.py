"""Audit of tasks and rewards before training."""
