"""How a denoising step makes its prediction: a class for each way."""
