"""Audit of an environment before anybody trains on it."""
