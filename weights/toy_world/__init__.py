"""The recipe of the embedded model: a tiny CogVideoX, trained from scratch on the procedural world."""
