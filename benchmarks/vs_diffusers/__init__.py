"""This library beside diffusers on the same machine."""
