"""Stages of a run: what each kind trains on, or samples."""
