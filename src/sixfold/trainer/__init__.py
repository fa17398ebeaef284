"""The trainer: one forward, one backward, one step, for any loss it is handed; and the checkpoints it resumes from."""
