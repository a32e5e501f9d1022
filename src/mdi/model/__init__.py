"""What a model is: pure values and numbers, without torch, files or sockets."""
