"""The embedded models: tiny CogVideoX on a procedural world of moving shapes; how they are made, and judged."""
