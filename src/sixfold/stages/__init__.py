"""Stages of a run."""
