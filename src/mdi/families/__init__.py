"""What only a family of models knows: one file each, and the registry of all. Pure, without torch, files or sockets."""
