"""Discrete-event simulation of training: colocated, two pools in turn, and asynchronous.

Durations come from the time model of `planning`. The simulation adds what a closed form leaves out:
lengths that differ, groups that are discarded, a bound on staleness, and devices that fail.
"""
