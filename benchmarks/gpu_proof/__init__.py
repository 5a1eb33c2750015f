"""Checks and times this library on an NVIDIA GPU, in one command: `python -m benchmarks.gpu_proof`."""
