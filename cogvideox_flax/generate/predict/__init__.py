"""How a denoising step makes its prediction: a class per way, with one call."""
