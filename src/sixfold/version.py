"""The version of Sixfold."""

__version__ = "0.1.0"
