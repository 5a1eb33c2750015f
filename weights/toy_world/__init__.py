"""The training of the embedded model: a tiny CogVideoX, from scratch, on a procedural world of moving shapes."""
