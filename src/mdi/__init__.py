"""Model-distributed inference: one language model, cut into stages, over a ring of small machines."""

__version__ = "2.0.0"
