"""Our own kernels for processors: the layout of weights in memory and files, and the C++ that computes with it."""

LAYOUT_VERSION = (
    1  # of the description in `layout`; files of another version are refused, and nodes of another one say so
)
