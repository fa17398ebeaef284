"""Stages of a run: what each kind trains or makes."""
