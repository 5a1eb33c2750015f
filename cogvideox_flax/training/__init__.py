"""Fine-tuning: settings, data, objective, optimizer, training loop. Needs the `train` extra."""
