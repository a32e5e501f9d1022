"""Plots, and what processes take of memory; beside the core."""
