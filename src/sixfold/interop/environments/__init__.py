"""Environments written for other libraries, unchanged. Each library is imported by one module."""
