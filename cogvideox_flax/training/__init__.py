"""Training and fine-tuning: objectives, optimiser, loop, data (the `train` extra)."""
