"""This machine: its memory, cores and devices, and what computes on them."""
