"""PyTorch checkpoints in the Hugging Face layout -> native JAX checkpoints, once.

Imported as `cogvideox_flax.conversion`, a link to this folder.
"""
