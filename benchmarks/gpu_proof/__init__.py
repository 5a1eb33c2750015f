"""What holds on a machine with an NVIDIA GPU, in one command: `python -m benchmarks.gpu_proof`."""
