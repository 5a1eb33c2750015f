"""Compares this library with diffusers on the same machine."""
