"""Files of a run: atomic writes, the folder with its lock, and its replacement. No torch."""
