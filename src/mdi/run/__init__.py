"""A run at its starter: choose a ring, form it, generate; when a node was lost, left or joined, choose again."""
