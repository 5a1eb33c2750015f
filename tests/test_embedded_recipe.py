"""What only the embedded model's training has: rounds, repeated clips, a standardised latent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import relative_error

from cogvideox_flax.checkpoint import hub, read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.models.cogvideox.config import VAEConfig
from weights.toy_world import world
from weights.toy_world.autoencoder import standardise
from weights.toy_world.diffusion import repeated
from weights.toy_world.settings import Run


def test_standardise_moves_the_latent_and_not_the_video():
    config = VAEConfig(block_channels=(8, 8, 8, 8), layers_per_block=1, norm_groups=2)
    vae = Autoencoder(config, rngs=nnx.Rngs(0))
    video = jax.random.uniform(jax.random.key(1), (1, 1, 32, 32, 3), minval=-1)
    shift, std = jnp.linspace(-1, 1, 16), jnp.linspace(0.5, 2, 16)
    encode, decode = jax.jit(lambda vae, x: vae.encode(x)), jax.jit(lambda vae, z: vae.decode(z))
    mean, logvar = encode(vae, video)
    moved = standardise(vae, shift, std)
    mean2, logvar2 = encode(moved, video)
    np.testing.assert_allclose(mean2, (mean - shift) / std, atol=2e-5)
    np.testing.assert_allclose(logvar2, logvar - 2 * jnp.log(std), atol=2e-5)
    scaled = standardise(vae, jnp.zeros(16), std)
    assert relative_error(decode(scaled, mean / std), decode(vae, mean)) < 1e-4
    assert np.array_equal(encode(vae, video)[0], mean)  # the original is untouched


def test_hard_clips_are_shown_more_often():
    scenes = [world.tracks_of_clip(3, i)[0] for i in range(200)]
    shown = np.bincount(repeated(scenes, 4), minlength=200)
    for scene, times in zip(scenes, shown, strict=True):
        hard = ("small", "square") in [(thing.size, thing.shape) for thing in scene.things]
        assert times == (4 if hard else 1)
    assert 0.1 < (shown == 4).mean() < 0.3
    np.testing.assert_array_equal(repeated(scenes, 1), np.arange(200))


def test_rounds_of_cooling_have_places_of_their_own(tmp_path):
    assert [phase.name for phase in Run(tmp_path, stop=7, rounds=3).phases] == [
        "transformer",
        "transformer-cool-7",
        "transformer-cool-7-2",
        "transformer-cool-7-3",
    ]
    again = Run(tmp_path, base=hub.EMBEDDED, rounds=2)
    which = read_manifest(hub.EMBEDDED).weights["transformer"]["sha256"][:8]
    assert [phase.name for phase in again.phases] == [f"transformer-{which}-again-{n}" for n in (1, 2)]
    assert again.steps_before() >= 26_500
    with pytest.raises(InputError, match="got 0 rounds"):
        Run(tmp_path, rounds=0)
