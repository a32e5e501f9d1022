"""Training: data, a training loop, LoRA, several processes; beside the core, which does not import it."""
