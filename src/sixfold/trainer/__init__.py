"""The trainer: forward, backward and optimizer step for any loss, and checkpoints for resuming."""
