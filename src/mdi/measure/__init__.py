"""Measures nodes and links, and plans which node gets which blocks."""
