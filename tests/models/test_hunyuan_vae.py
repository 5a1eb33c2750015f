"""HunyuanVideo-1.5's VAE: against diffusers, streamed, in tiles, in bfloat16 and on every mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

from cogvideox_flax.checkpoint import load_component
from cogvideox_flax.conversion import mapping
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.models.hunyuan_video15.config import VAEConfig
from cogvideox_flax.models.hunyuan_video15.model import HunyuanVideo15
from cogvideox_flax.models.tiling import Tiling
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.sharding import make_mesh
from tests.support.hunyuan_layout import build
from tests.support.reference import random, relative_error, rms_error
from tests.support.released_layout import randomise

BAR = 1e-4


def torch_of(x: jax.Array) -> torch.Tensor:
    return torch.from_numpy(np.array(x)).permute(0, 4, 1, 2, 3)


def array_of(x: torch.Tensor) -> np.ndarray:
    return x.float().permute(0, 2, 3, 4, 1).numpy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(diffusers' model, the native directory of the same weights); two ResNet blocks, so that they are a stack."""
    folder = tmp_path_factory.mktemp("vae")
    module = randomise(build("vae", small=True, layers_per_block=2))
    module.save_pretrained(folder / "hf" / "vae")
    convert(folder / "hf", folder / "native", components=["vae"])
    module.enable_slicing()  # without it, diffusers takes one video only
    return module, folder / "native"


@pytest.fixture(scope="module")
def vae(pair):
    return load_component("vae", pair[1], "float32")


# One jit for all tests: a program is traced and compiled once per shape. With the pipeline's options: by XLA's default
# order, devices of a CPU may reach the collectives of two chunks in different orders and wait for each other.
jit = partial(jax.jit, compiler_options=compiler_options("float32"))
decode = jit(lambda model, z, **how: model.decode(z, **how), static_argnames=("tiling", "slicing"))
encode = jit(lambda model, video, **how: model.encode(video, **how), static_argnames="tiling")


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_decoding_frame_by_frame_is_decoding_the_clip(pair, vae, frames):
    """diffusers decodes the clip whole, with a mask over all of its pixels."""
    z = random(frames, 2, frames, 2, 3, 4)
    with torch.no_grad():
        theirs = array_of(pair[0].decode(torch_of(z), return_dict=False)[0])
    ours = decode(vae, z)
    assert ours.shape == theirs.shape == (2, 4 * frames - 3, 32, 48, 3)
    assert relative_error(ours, theirs) < BAR
    if frames == 2:
        np.testing.assert_allclose(decode(vae, z, slicing=True), ours, atol=1e-5 * ours.std())


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_encoding(pair, vae, frames):
    video = random(frames, 2, frames, 32, 48, 3)
    with torch.no_grad():
        posterior = pair[0].encode(torch_of(video)).latent_dist
    ours = encode(vae, video)
    for mine, theirs in zip(ours, (posterior.mean, posterior.logvar), strict=True):
        assert mine.shape == (2, (frames + 3) // 4, 2, 3, 4)
        assert relative_error(mine, array_of(theirs)) < BAR


def test_tiles(pair, vae):
    """Latents of two tiles, an image of two by two, of which the last are cut."""
    module, _ = pair
    z, video = random(0, 1, 2, 3, 6, 4), random(1, 1, 1, 96, 64, 3)
    module.enable_tiling(
        tile_sample_min_height=64, tile_sample_min_width=64, tile_latent_min_height=4, tile_latent_min_width=4
    )
    try:
        with torch.no_grad():
            decoded = array_of(module.decode(torch_of(z), return_dict=False)[0])
            encoded = array_of(module.encode(torch_of(video)).latent_dist.mean)
    finally:
        module.use_tiling = False
    with torch.no_grad():
        whole = array_of(module.decode(torch_of(z), return_dict=False)[0])
    tiling = Tiling(64, 64, 0.25, 0.25)
    assert relative_error(decode(vae, z, tiling=tiling), decoded) < BAR
    assert relative_error(encode(vae, video, tiling=tiling)[0], encoded) < BAR
    assert relative_error(whole, decoded) > 0.01  # tiles do see less
    assert VAEConfig().tiling == Tiling(256, 256, 0.25, 0.25)


def test_bfloat16_is_no_worse_than_torch(pair):
    module, native = pair
    z, video = random(0, 1, 3, 3, 5, 4), random(1, 1, 9, 48, 80, 3)
    rounded = AutoencoderKLHunyuanVideo15(**module.config)
    rounded.load_state_dict(module.state_dict())
    rounded = rounded.to(torch.bfloat16)
    with torch.no_grad():
        exact = array_of(module.decode(torch_of(z), return_dict=False)[0])
        theirs = array_of(rounded.decode(torch_of(z).to(torch.bfloat16), return_dict=False)[0])
        exact_mean = array_of(module.encode(torch_of(video)).latent_dist.mean)
        their_mean = array_of(rounded.encode(torch_of(video).to(torch.bfloat16)).latent_dist.mean)
    model = load_component("vae", native, "bfloat16")
    assert rms_error(decode(model, z), exact) <= rms_error(theirs, exact)
    assert rms_error(encode(model, video)[0], exact_mean) <= rms_error(their_mean, exact_mean)


@pytest.mark.parametrize(
    ("mesh", "rows", "columns"),
    [
        ((1, 4, 1), 7, 3),  # neither, a row is added
        pytest.param((2, 2, 2), 3, 8, marks=pytest.mark.further),  # 8 columns divide
        pytest.param((1, 8, 1), 5, 3, marks=pytest.mark.further),  # too few for 8 devices
        pytest.param((1, 8, 1), 3, 8, marks=pytest.mark.further),
        pytest.param((1, 1, 3), 3, 8, marks=pytest.mark.further),  # the rows divide
        pytest.param((2, 2, 2), 15, 5, marks=pytest.mark.further),
    ],
)
def test_every_mesh(pair, vae, mesh, rows, columns):
    z, video = random(0, 1, 2, rows, columns, 4), random(1, 1, 5, 16 * rows, 16 * columns, 3)
    whole = decode(vae, z), encode(vae, video)[0]
    split = make_mesh(*mesh)
    model = load_component("vae", pair[1], "float32", split)
    with jax.set_mesh(split):
        parts = decode(model, z), encode(model, video)[0]
    for part, one in zip(parts, whole, strict=True):
        assert relative_error(part, one) < 1e-5


def test_gradients(vae):
    z = random(0, 1, 1, 2, 2, 4)
    loss = jax.jit(lambda z, vae: jnp.square(vae.decode(z)).mean())
    gradient, nudge = jax.jit(jax.grad(loss))(z, vae), 1e-2 * random(1, *z.shape)
    np.testing.assert_allclose((gradient * nudge).sum(), (loss(z + nudge, vae) - loss(z - nudge, vae)) / 2, rtol=2e-2)


def test_the_released_sizes():
    with torch.device("meta"):
        module = build("vae", small=False)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    config = VAEConfig.from_hf(dict(module.config))
    assert config == VAEConfig()
    assert len(mapping.weight_moves(HunyuanVideo15, "vae", config, shapes).moves) == len(shapes) == 218
    count = HunyuanVideo15.components["vae"].num_parameters(config)
    assert count == sum(parameter.numel() for parameter in module.parameters())
    assert round(count / 1e9, 2) == 1.26


def test_faults(vae):
    with pytest.raises(InputError, match=r"the video has 6 frames; they must be 4 n \+ 1"):
        vae.encode(jnp.zeros((1, 6, 32, 32, 3)))
    with pytest.raises(InputError, match=r"20x32.*multiples of 16"):
        vae.encode(jnp.zeros((1, 5, 20, 32, 3)))
    with pytest.raises(InputError, match="the latent has shape"):
        vae.decode(jnp.zeros((1, 2, 2, 2, 16)))
    with pytest.raises(CheckpointError, match="3 levels for 16x compression; expected 5"):
        VAEConfig.from_hf({"block_out_channels": [8, 8, 8]})
