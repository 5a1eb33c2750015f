"""The training of the embedded model: its objectives, phases, oversampled clips, standardised latents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import load_text_encoder, load_transformer, load_vae, read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.video import from_uint8
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.models.cogvideox.config import VAEConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.training.objectives import velocity_loss
from tests.support.reference import relative_error
from weights.toy_world import world
from weights.toy_world.make import four_steps, settings
from weights.toy_world.make.autoencoder import standardise
from weights.toy_world.make.decoder import NEAR, decoder_loss, near_things, train_decoder
from weights.toy_world.make.diffusion import oversample
from weights.toy_world.make.four_steps import train_four_steps, velocity_between
from weights.toy_world.make.image_to_video import IMAGE_TRANSFORMER, image_to_video_loss, train_image_to_video, widen
from weights.toy_world.make.objectives import TimestepDensity, focus, reconstruction
from weights.toy_world.make.settings import Run


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


class HalvingVAE:
    """Encodes to half the video with a given spread, decodes to what it is given: its loss is known on paper."""

    def encode(self, video):
        return 0.5 * video, jnp.full(video.shape, -3.0)

    def decode(self, z):
        return z


def test_reconstruction_terms():
    video = jax.random.uniform(jax.random.key(1), (2, 3, 8, 8, 3), minval=-1)
    loss, logged = reconstruction(HalvingVAE(), video, jax.random.key(2), kl_weight=0.5, l1_weight=0.25)
    posterior = torch.distributions.Normal(torch.tensor(np.asarray(0.5 * video)), float(np.exp(-1.5)))
    kl = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).mean().item()
    assert float(logged["kl"]) == pytest.approx(kl, rel=1e-4)
    error = np.exp(-1.5) * np.asarray(jax.random.normal(jax.random.key(2), video.shape)) - 0.5 * np.asarray(video)
    mse, l1 = np.square(error).mean(), abs(error).mean()
    assert float(loss) == pytest.approx(mse + 0.25 * l1 + 0.5 * kl, rel=1e-4)
    psnr = np.mean([10 * np.log10(4 / np.square(e).mean()) for e in error])
    assert float(logged["psnr"]) == pytest.approx(psnr, rel=1e-4)
    assert float(logged["posterior_std"]) == pytest.approx(np.exp(-1.5), rel=1e-4)


def test_timesteps_follow_the_density():
    density = focus(0.25, 0.9, 0.85)
    samples = np.asarray(density((jnp.arange(20000) + 0.5) / 20000))
    shares = np.histogram(samples, [0, 0.25, 0.9, 1])[0] / 20000
    np.testing.assert_allclose(shares, [0.15 * 25 / 35, 0.85, 0.15 * 10 / 35], atol=1e-3)
    assert (np.diff(samples) > 0).all() and samples[0] >= 0 and samples[-1] < 1
    three = TimestepDensity((0.0, 0.3, 0.7, 1.0), (0.4, 0.5, 0.1))
    np.testing.assert_allclose(three(jnp.array([0.2, 0.4, 0.65, 0.95])), [0.15, 0.3, 0.5, 0.85], atol=1e-6)
    seen = {}

    def denoiser(x, t):
        seen.update(t=np.asarray(t))
        return jnp.zeros_like(x)

    latents = jnp.zeros((40, 1, 2, 2, 16))
    velocity_loss(denoiser, latents, jax.random.key(0), DDIMScheduler(SchedulerConfig()), density)
    assert ((seen["t"] >= 250) & (seen["t"] < 900)).sum() in (33, 34, 35)
    for low, high in ((0.5, 0.4), (0, 0.5), (0.5, 1)):
        with pytest.raises(ValueError, match="expected 0 < low"):
            focus(low, high, 0.5)
    for edges, shares in (
        ((0, 0.5), (1,)),
        ((0, 1), (0.9,)),
        ((0, 1), (0.5, 0.5)),
        ((0, 0.6, 0.5, 1), (0.4, 0.3, 0.3)),
    ):
        with pytest.raises(ValueError, match="edges that rise from 0 to 1"):
            TimestepDensity(edges, shares)


def test_clips_with_small_squares_are_oversampled():
    scenes = [world.tracks_of_clip(3, i)[0] for i in range(200)]
    shown = np.bincount(oversample(scenes, 4), minlength=200)
    for scene, times in zip(scenes, shown, strict=True):
        hard = ("small", "square") in [(thing.size, thing.shape) for thing in scene.things]
        assert times == (4 if hard else 1)
    assert 0.1 < (shown == 4).mean() < 0.3
    np.testing.assert_array_equal(oversample(scenes, 1), np.arange(200))


def test_every_round_has_a_folder_of_its_own(tmp_path):
    assert [phase.name for phase in Run(tmp_path, constant_steps=7, rounds=3).phases] == [
        "transformer",
        "transformer-cool-7",
        "transformer-cool-7-2",
        "transformer-cool-7-3",
    ]
    again = Run(tmp_path, base=hub.EMBEDDED, rounds=2)
    which = read_manifest(hub.EMBEDDED).weights["transformer"]["sha256"][:8]
    assert [phase.name for phase in again.phases] == [f"transformer-{which}-again-{n}" for n in (1, 2)]
    assert again.steps_before() >= 26_500
    with pytest.raises(InputError, match="1 round or more; got 0"):
        Run(tmp_path, rounds=0)


@pytest.mark.further
def test_image_to_video_starts_from_the_same_prediction():
    """The image's weights are 0 at first; then the loss depends on it, and the text encoder is not trained."""
    transformer = load_transformer(hub.EMBEDDED, dtype="float32")
    wide = widen(transformer)
    assert wide.config.takes == "image" and wide.config == IMAGE_TRANSFORMER
    x, image = (jax.random.normal(jax.random.key(i), (2, n, 8, 8, 16)) for i, n in ((0, 5), (1, 1)))
    features = {"prompt_embeds": jax.random.normal(jax.random.key(2), (2, 24, 128))}
    same = CogVideoX.predict(transformer, x, features, jnp.int32(500))
    np.testing.assert_array_equal(CogVideoX.predict(wide, x, features | {"image_latents": image}, jnp.int32(500)), same)

    batch = {"mean": x, "std": 0.1 * jnp.ones_like(x), "image_mean": image, "image_std": 0.1 * jnp.ones_like(image)}
    batch |= {"ids": jnp.ones((2, 24), jnp.int32), "corners": jnp.zeros((2, 5, 8, 8))}
    frozen = {"empty": jnp.zeros(24, jnp.int32), "text_encoder": load_text_encoder(hub.EMBEDDED, dtype="float32")}
    gradient = jax.jit(jax.grad(lambda params: image_to_video_loss(params, frozen, batch, jax.random.key(3))[0]))
    kernel = gradient({"transformer": wide})["transformer"].patch_embed.kernel[...].reshape(4, 32, -1)
    assert float(jnp.abs(kernel[:, 16:]).max()) > 1e-6


@pytest.mark.parametrize("train", [train_image_to_video, train_decoder, train_four_steps])
def test_these_need_a_base(tmp_path, train):
    with pytest.raises(InputError, match="give it with --from"):
        train(Run(tmp_path))


def test_errors_near_things_weigh_more():
    scene, tracks = world.tracks_of_clip(3, 0)
    video = world.render(scene, tracks)
    near = near_things(video[None])[0].astype(bool)
    thing = (video != video[:, :1, :1]).any(-1)
    assert near[thing].all() and near.mean() < 0.6
    y, _ = np.nonzero(thing[0])
    rows = np.nonzero(near[0].any(1))[0]
    assert (rows[0], rows[-1]) == (max(y.min() - NEAR, 0), min(y.max() + NEAR, 63))


@pytest.mark.further
def test_the_decoder_learns_from_both_kinds_of_latents_and_the_encoder_does_not():
    vae = load_vae(hub.EMBEDDED, dtype="float32")
    clips = [world.sample_clip(5, i, frames=1).video for i in range(2)]
    video = from_uint8(np.stack(clips))
    mean, _ = jax.jit(lambda vae, video: vae.encode(video))(vae, video)
    batch = {"mean": mean, "made": mean + 1.0, "video": jnp.asarray(video), "near": near_things(np.stack(clips))}
    loss = jax.jit(lambda vae, batch, key: decoder_loss({"vae": vae}, None, batch, key)[0])
    keys = [jax.random.key(i) for i in range(12)]
    both = {round(float(loss(vae, batch, key)) / 0.02) for key in keys}
    alike = {round(float(loss(vae, batch | {"made": mean}, key)) / 0.02) for key in keys}
    assert len(both) > len(alike), "latents that are wrong cost more, where they are drawn"
    gradient = jax.jit(jax.grad(lambda vae: decoder_loss({"vae": vae}, None, batch, keys[0])[0]))(vae)
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(gradient.encoder))
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient.decoder)) > 0


def test_a_velocity_leads_to_the_next_state():
    """Also from pure noise, where the latents say nothing of x0."""
    scheduler = DDIMScheduler(settings.SCHEDULER)
    plan = scheduler.plan(4)
    here, there = (jax.random.normal(jax.random.key(i), (4, 5, 2, 2, 16)) for i in range(2))
    v = velocity_between(jax.tree.map(jnp.asarray, plan), jnp.arange(4), here, there)
    for i in range(4):
        found, _ = scheduler.step(plan, i, v[i : i + 1], here[i : i + 1])
        np.testing.assert_allclose(found, there[i : i + 1], atol=1e-4)


def test_a_perfect_adapter_has_no_loss(monkeypatch):
    """States of a model whose velocity is constant, and that model."""
    scheduler = DDIMScheduler(settings.SCHEDULER)
    plan = scheduler.plan(4)
    v = jax.random.normal(jax.random.key(0), (8, 5, 2, 2, 16))
    states = [jax.random.normal(jax.random.key(1), v.shape)]
    for i in range(4):
        states.append(scheduler.step(plan, i, v, states[-1])[0])
    batch = {"states": jnp.stack(states, 1)}
    for offset, close in ((0.0, True), (0.1, False)):
        monkeypatch.setattr(
            four_steps, "_bind", lambda *_, offset=offset: (lambda x, context, t, remat: v + offset, None)
        )
        assert (float(four_steps.step_loss({}, {}, batch, jax.random.key(2))[0]) < 1e-6) == close
