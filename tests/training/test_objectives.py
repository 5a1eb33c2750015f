"""The training objective against diffusers' schedulers, and means over micro-batches."""

from __future__ import annotations

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr

from cogvideox_flax.models.codec import LatentStatistics
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.hunyuan_video15.model import HunyuanVideo15
from cogvideox_flax.schedulers import DDIMScheduler, FlowMatchConfig, FlowMatchScheduler, TimestepLaw
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.training.config import LoopConfig
from cogvideox_flax.training.loop import Trainer
from cogvideox_flax.training.metrics import Mean, read_metrics
from cogvideox_flax.training.objectives import drop_captions, sample_latents, velocity_loss


def test_v_prediction_is_the_reference_target():
    scheduler = diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, snr_shift_scale=3.0)
    latents = np.random.default_rng(0).normal(size=(6, 2, 4, 4, 16)).astype(np.float32)
    seen = {}

    def denoiser(x, t):
        seen.update(x=np.asarray(x), t=np.asarray(t))
        return jnp.zeros_like(x)

    loss, logged = velocity_loss(denoiser, latents, jax.random.key(1), DDIMScheduler(SchedulerConfig()))
    noise = np.asarray(jax.random.normal(jax.random.split(jax.random.key(1), 3)[0], latents.shape))
    args = torch.tensor(latents), torch.tensor(noise), torch.tensor(seen["t"])
    np.testing.assert_allclose(seen["x"], scheduler.add_noise(*args).numpy(), atol=2e-5)
    target = scheduler.get_velocity(*args).numpy()
    assert float(loss) == pytest.approx(float(np.square(target).mean()), rel=1e-4)
    assert sorted(seen["t"] * 6 // 1000) == list(range(6))  # one timestep in each sixth
    halves = [float(np.square(target[seen["t"] >= 500]).mean()), float(np.square(target[seen["t"] < 500]).mean())]
    assert [float(logged["loss_noisy"]), float(logged["loss_clean"])] == pytest.approx(halves, rel=1e-4)


def loss_and_timesteps(latents, scheduler, law):
    """With a denoiser that gives zero; also what it saw."""
    seen = {}

    def denoiser(x, t):
        seen.update(x=np.asarray(x), t=np.asarray(t))
        return jnp.zeros_like(x)

    return float(velocity_loss(denoiser, latents, jax.random.key(1), scheduler, law)[0]), seen["t"], seen["x"]


def test_hunyuan_video_is_trained_as_its_release():
    """Tencent's train.py: a logit-normal law within a margin, then shift 3; timesteps are not rounded."""
    u = torch.linspace(0, 1, 1002, dtype=torch.float64)[1:-1]
    t = 1 / (1 + torch.exp(-torch.special.ndtri(u))) * (1 - 2e-5) + 1e-5
    law = HunyuanVideo15.recipe.timesteps
    np.testing.assert_allclose(law(jnp.asarray(u.numpy(), jnp.float32)), 3 * t / (1 + 2 * t), rtol=2e-5)
    ends = law(jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(ends, [3e-5, 1 - 1e-5 / 3], rtol=1e-4)
    latents = np.random.default_rng(0).normal(size=(6, 2, 4, 4, 16)).astype(np.float32)
    loss, t, x = loss_and_timesteps(latents, FlowMatchScheduler(FlowMatchConfig(shift=9.0)), law)
    noise = np.asarray(jax.random.normal(jax.random.split(jax.random.key(1), 3)[0], latents.shape))
    s = (t / 1000).reshape(-1, 1, 1, 1, 1)
    np.testing.assert_allclose(x, (1 - s) * latents + s * noise, atol=1e-6)
    assert loss == pytest.approx(float(np.square(noise - latents).mean()), rel=1e-5)
    quantiles = 1000 * np.asarray(law(jnp.arange(7) / 6))
    assert (np.digitize(np.sort(t), quantiles) == np.arange(1, 7)).all(), "one timestep in each sixth of the law"
    assert (t != t.astype(int)).all()


def test_cogvideox_is_trained_at_uniform_whole_timesteps():
    latents, scheduler = np.ones((6, 1, 2, 2, 16), np.float32), DDIMScheduler(SchedulerConfig())
    _, time_key, permutation_key = jax.random.split(jax.random.key(1), 3)
    u = (jnp.arange(6) + jax.random.uniform(time_key, (6,))) / 6
    expected = jax.random.permutation(permutation_key, (u * 1000).astype(jnp.int32))
    for law in (None, CogVideoX.recipe.timesteps):
        np.testing.assert_array_equal(loss_and_timesteps(latents, scheduler, law)[1], expected)


@pytest.mark.parametrize(
    ("law", "u", "expected"),
    [
        # one standard deviation below the mean, the mean, one above: the sigmoids of 0.5, 1 and 1.5
        (TimestepLaw(law="logit_normal", mean=1.0, std=0.5), [0.158655, 0.5, 0.841345], [0.622459, 0.731059, 0.817574]),
        (TimestepLaw(shift=3.0), [0.2, 0.5, 0.8], [3 / 7, 3 / 4, 12 / 13]),
        (TimestepLaw(law="mode"), [0.25, 0.5, 0.75], [0.616416, 0.5, 0.383584]),
    ],
    ids=["logit_normal", "shift", "mode"],
)
def test_other_laws(law, u, expected):
    np.testing.assert_allclose(law(jnp.array(u)), expected, atol=2e-6)


def test_a_perfect_denoiser_has_no_loss():
    latents = jax.random.normal(jax.random.key(0), (4, 2, 4, 4, 16))
    key, config = jax.random.key(1), SchedulerConfig(snr_shift_scale=1.0)
    noise = jax.random.normal(jax.random.split(key, 3)[0], latents.shape)
    abar = jnp.asarray(DDIMScheduler(config).alphas_cumprod)

    def perfect(x, t):
        a = abar[t].reshape(-1, 1, 1, 1, 1)
        return jnp.sqrt(a) * noise - jnp.sqrt(1 - a) * latents

    assert float(velocity_loss(perfect, latents, key, DDIMScheduler(config))[0]) < 1e-10


def test_pixel_weights_give_a_weighted_mean():
    """What is wrong by 1 in one latent pixel of eight, which weighs nine times as much as the others."""
    latents, key, config = jnp.zeros((3, 2, 2, 2, 16)), jax.random.key(1), SchedulerConfig()
    noise = jax.random.normal(jax.random.split(key, 3)[0], latents.shape)
    abar = jnp.asarray(DDIMScheduler(config).alphas_cumprod)
    wrong = jnp.zeros(latents.shape).at[:, 1, 0, 1].set(1.0)
    weights = jnp.ones(latents.shape[:-1]).at[:, 1, 0, 1].set(9.0)

    def denoiser(x, t):
        return jnp.sqrt(abar[t]).reshape(-1, 1, 1, 1, 1) * noise + wrong

    scheduler = DDIMScheduler(config)
    assert float(velocity_loss(denoiser, latents, key, scheduler)[0]) == pytest.approx(1 / 8, rel=1e-4)
    assert float(velocity_loss(denoiser, latents, key, scheduler, weights=weights)[0]) == pytest.approx(
        9 / 16, rel=1e-4
    )


def test_min_snr_weights_clips_by_their_timestep():
    latents, key, scheduler = jnp.zeros((12, 1, 2, 2, 16)), jax.random.key(1), DDIMScheduler(SchedulerConfig())
    theirs, seen = diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, snr_shift_scale=3.0), {}

    def denoiser(x, t):
        seen["t"] = np.asarray(t)
        return scheduler.velocity(latents, noise, t) + 1

    noise = jax.random.normal(jax.random.split(key, 3)[0], latents.shape)
    loss, _ = velocity_loss(denoiser, latents, key, scheduler, min_snr=5.0)
    snr = compute_snr(theirs, torch.tensor(seen["t"]))
    weights = torch.minimum(snr, torch.tensor(5.0)) / (snr + 1)  # as in diffusers' trainers, for v_prediction
    assert float(loss) == pytest.approx(float(weights.mean()), rel=1e-4)
    assert (snr > 5).any() and (snr < 5).any()


def test_captions_are_dropped_at_the_rate():
    ids = jnp.arange(1, 20001)[:, None] * jnp.ones((1, 3), jnp.int32)
    empty = jnp.array([-1, -2, -3])
    out = np.asarray(drop_captions(ids, empty, 0.1, jax.random.key(0)))
    dropped = (out == np.asarray(empty)).all(1)
    assert 0.09 < dropped.mean() < 0.11
    assert np.array_equal(out[~dropped], np.asarray(ids)[~dropped])


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_means_over_parts_of_a_batch_skip_empty_micro_batches(tmp_path, accumulate):
    """`loss_noisy` and `loss_clean` of a step are means over its clips, however they are cut into micro-batches."""

    def loss(params, frozen, batch, key):
        x, noisy = batch["x"] - params["transformer"], batch["noisy"]
        means = {
            "noisy": Mean(jnp.where(noisy, x, 0).sum(), noisy.sum()),
            "none": Mean(jnp.zeros(()), jnp.zeros(())),
        }
        return jnp.square(x).mean(), means

    def batches(step):
        return {"x": np.float32([8, 1, 2, 4]), "noisy": np.array([True, False, False, False])}

    config = LoopConfig(steps=1, accumulate=accumulate, log_every=1)
    Trainer(loss=loss, batches=batches, config=config, folder=tmp_path).train({"transformer": jnp.zeros(())})
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["noisy"] == 8 and "none" not in line
    assert line["loss"] == pytest.approx((64 + 1 + 4 + 16) / 4)


def test_a_small_batch_may_have_no_noisy_clip():
    _, logged = velocity_loss(
        lambda x, t: jnp.zeros_like(x), jnp.ones((1, 1, 2, 2, 16)), jax.random.key(0), DDIMScheduler(SchedulerConfig())
    )
    assert sorted(float(logged[name].count) for name in ("loss_noisy", "loss_clean")) == [0, 1]
    assert sum(np.isnan(float(logged[name])) for name in ("loss_noisy", "loss_clean")) == 1


def test_latents_are_scaled_samples_with_the_first_frame_repeated():
    mean = jax.random.normal(jax.random.key(0), (2, 3, 4, 6, 16)).astype(jnp.float16)
    exact = sample_latents(mean, jnp.zeros_like(mean), jax.random.key(1), LatentStatistics(0.7), 1)
    assert exact.shape == (2, 4, 4, 6, 16)
    np.testing.assert_allclose(exact[:, 1:], 0.7 * mean.astype(jnp.float32), rtol=1e-6)
    noisy = sample_latents(mean, jnp.full_like(mean, 2), jax.random.key(1), LatentStatistics(0.7), 1)
    assert (noisy[:, 0] == noisy[:, 1]).all()  # one sample, twice
    assert abs(float((noisy - exact)[:, 1:].std()) / (0.7 * 2) - 1) < 0.05
    assert sample_latents(mean, mean, jax.random.key(1), LatentStatistics(0.7), 0).shape == mean.shape
