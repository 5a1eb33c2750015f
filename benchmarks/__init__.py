"""Benchmarks: each a `python -m benchmarks.NAME` that writes JSON and a readable table."""
