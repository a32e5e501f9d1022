"""Our own kernels for processors: how weights lie in memory and in files, and the C++ that computes with them as they lie."""
