"""A training step's loss and gradients beside those of a reference module in PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch

from cogvideox_flax.checkpoint import load_component, parameters
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.training import finetune as finetuning
from cogvideox_flax.training.job import FinetuneJob

GRADIENT_BAR = 5e-4
"""The largest difference, in standard deviations of a parameter's gradient, which is a sum over all tokens."""


def channels_first(x: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(x, np.float32)).movedim(-1, 1)


def loss_and_gradient(
    job: FinetuneJob, native: Path, frozen: Any, batch: Any, key: jax.Array
) -> tuple[float, Any, torch.Tensor, np.ndarray]:
    """The loss of all weights, its gradient, and what the model saw: noised latents [B, C, T, h, w] and timesteps."""
    seen: dict[str, np.ndarray] = {}
    real = finetuning.velocity_loss

    def spy(denoiser: Any, latents: Any, *args: Any, **options: Any) -> Any:
        def watched(x: Any, t: Any) -> Any:
            jax.debug.callback(lambda x, t: seen.update(x=np.array(x), t=np.array(t)), x, t)
            return denoiser(x, t)

        return real(watched, latents, *args, **options)

    def objective(params: Any) -> Any:
        return finetuning.loss_of(job)({"transformer": params}, frozen, batch, key)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetuning, "velocity_loss", spy)
        loss, gradient = jax.jit(jax.value_and_grad(objective))(load_component("transformer", native, dtype="float32"))
        jax.block_until_ready(loss)
    return float(loss), gradient, channels_first(seen["x"]), seen["t"]


def cogvideox_prediction(model: Any, beside: torch.Tensor, x: torch.Tensor, t: Any, text: Any) -> torch.Tensor:
    """The prediction [B, C, T, h, w] of diffusers' transformer.

    Args:
        beside: [B, T, D, h, w], what stands beside the noisy latents.
        x: [B, C, T, h, w].
    """
    inputs = torch.cat([x.movedim(1, 2), beside], 2)
    _, frames, _, height, width = inputs.shape
    pipe: Any = SimpleNamespace(
        transformer=SimpleNamespace(config=model.config),
        vae_scale_factor_spatial=8,
        _execution_device=torch.device("cpu"),
    )
    rotary = None
    if model.config.use_rotary_positional_embeddings:
        make: Any = diffusers.CogVideoXImageToVideoPipeline._prepare_rotary_positional_embeddings
        rotary = make(pipe, height * 8, width * 8, frames, torch.device("cpu"))
    prediction = model(
        hidden_states=inputs,
        encoder_hidden_states=torch.tensor(text["prompt_embeds"]),
        timestep=torch.tensor(t),
        ofs=None if model.config.ofs_embed_dim is None else inputs.new_full((1,), 2.0),
        image_rotary_emb=rotary,
        return_dict=False,
    )[0]
    return prediction.movedim(2, 1)


def check_step(
    loss: float, gradient: Any, theirs: torch.nn.Module, prediction: torch.Tensor, target: Any, folder: Path
) -> None:
    """Compare a loss and its gradient with those of a reference, in training mode, with this prediction and target."""
    expected = torch.nn.functional.mse_loss(prediction, channels_first(target))
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()
    with torch.no_grad():  # the gradients take the weights' way through the converter
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder / "hf" / "transformer")  # type: ignore[operator]
    convert(folder / "hf", folder / "native", components=["transformer"])
    values, ours = parameters(load_component("transformer", folder / "native")), parameters(gradient)
    assert values.keys() == ours.keys()
    values.pop("pos_embedding", None)  # a buffer there, without a gradient
    # of k's biases in the refiner only rounding is left: softmax does not change with them
    least = 1e-4 * max(value.std() for value in values.values())
    for name, value in values.items():
        assert np.abs(ours[name] - value).max() < GRADIENT_BAR * max(value.std(), least), name
