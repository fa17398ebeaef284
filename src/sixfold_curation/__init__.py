"""Data for training: stages that find what is wrong with a set of tasks, and say why."""
