"""Unchanged environments of other libraries as episodes. One module imports each library."""
