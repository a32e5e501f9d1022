"""A ring that survives the loss of nodes: which nodes take their blocks, and how the texts go on."""
