"""A ring that goes on without the nodes that it lost: who takes their blocks, and what becomes of the texts meanwhile."""
