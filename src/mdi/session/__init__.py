"""A run as an object that one opens."""
