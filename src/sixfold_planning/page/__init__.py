"""`sixfold plan`: its question, its answer, and both as text and as a page."""
