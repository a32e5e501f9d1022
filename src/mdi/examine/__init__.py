"""Examining a cluster before a run: what is wrong, and what to do about it."""
