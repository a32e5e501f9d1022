"""Our own kernels for processors: how weights lie in memory and in files, and the C++ that computes with them as they lie."""

LAYOUT_VERSION = (
    1  # of the description in `layout`; files of another version are refused, and nodes of another one say so
)
