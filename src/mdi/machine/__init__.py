"""This machine: its memory, cores and devices."""
