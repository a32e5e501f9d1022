"""Measuring nodes and links, and planning who holds which blocks."""
