"""PyTorch checkpoints in the Hugging Face layout -> native JAX checkpoints, once."""
