"""Other programs that run the same model, each in a process of its own that is asked to run one case after the other."""
