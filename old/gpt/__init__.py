"""What NanoGPT and GPT-2 share: GPT-2's architecture, stages without caches, and their way of going round the ring."""
