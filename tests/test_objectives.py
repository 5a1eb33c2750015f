"""The objectives of training, against diffusers' schedulers and torch's distributions."""

from __future__ import annotations

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.training.loop import LoopConfig, train
from cogvideox_flax.training.metrics import Mean, read_metrics
from cogvideox_flax.training.objectives import Focus, drop_captions, reconstruction, v_prediction


def test_v_prediction_is_the_reference_target():
    scheduler = diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, snr_shift_scale=3.0)
    latents = np.random.default_rng(0).normal(size=(6, 2, 4, 4, 16)).astype(np.float32)
    seen = {}

    def denoiser(x, t):
        seen.update(x=np.asarray(x), t=np.asarray(t))
        return jnp.zeros_like(x)

    loss, logged = v_prediction(denoiser, latents, jax.random.key(1), SchedulerConfig())
    noise = np.asarray(jax.random.normal(jax.random.split(jax.random.key(1), 3)[0], latents.shape))
    args = torch.tensor(latents), torch.tensor(noise), torch.tensor(seen["t"])
    np.testing.assert_allclose(seen["x"], scheduler.add_noise(*args).numpy(), atol=2e-5)
    target = scheduler.get_velocity(*args).numpy()
    assert float(loss) == pytest.approx(float(np.square(target).mean()), rel=1e-4)
    assert sorted(seen["t"] * 6 // 1000) == list(range(6))  # one timestep in each sixth
    halves = [float(np.square(target[seen["t"] >= 500]).mean()), float(np.square(target[seen["t"] < 500]).mean())]
    assert [float(logged["loss_noisy"]), float(logged["loss_clean"])] == pytest.approx(halves, rel=1e-4)


def test_focus_draws_its_share():
    focus = Focus(0.25, 0.9, 0.85)
    drawn = np.asarray(focus((jnp.arange(20000) + 0.5) / 20000))
    shares = np.histogram(drawn, [0, 0.25, 0.9, 1])[0] / 20000
    np.testing.assert_allclose(shares, [0.15 * 25 / 35, 0.85, 0.15 * 10 / 35], atol=1e-3)
    assert (np.diff(drawn) > 0).all() and drawn[0] >= 0 and drawn[-1] < 1
    np.testing.assert_allclose(Focus(0, 0.5, 0.5)(jnp.linspace(0, 0.99, 7)), np.linspace(0, 0.99, 7), atol=1e-6)
    seen = {}

    def denoiser(x, t):
        seen.update(t=np.asarray(t))
        return jnp.zeros_like(x)

    latents = jnp.zeros((40, 1, 2, 2, 16))
    v_prediction(denoiser, latents, jax.random.key(0), SchedulerConfig(), focus)
    assert ((seen["t"] >= 250) & (seen["t"] < 900)).sum() in (33, 34, 35)
    for wrong in ((0.5, 0.4, 0.5), (0, 1, 0.5), (0.1, 0.9, 0)):
        with pytest.raises(ValueError, match="focus needs"):
            Focus(*wrong)


def test_a_perfect_denoiser_has_no_loss():
    latents = jax.random.normal(jax.random.key(0), (4, 2, 4, 4, 16))
    key, config = jax.random.key(1), SchedulerConfig(snr_shift_scale=1.0)
    noise = jax.random.normal(jax.random.split(key, 3)[0], latents.shape)
    abar = jnp.asarray(DDIMScheduler(config).alphas_cumprod)

    def perfect(x, t):
        a = abar[t].reshape(-1, 1, 1, 1, 1)
        return jnp.sqrt(a) * noise - jnp.sqrt(1 - a) * latents

    assert float(v_prediction(perfect, latents, key, config)[0]) < 1e-10


def test_weighted_errors_are_a_mean_by_weight():
    """What is wrong by 1 in one latent pixel of eight, which weighs nine times as much as the others."""
    latents, key, config = jnp.zeros((3, 2, 2, 2, 16)), jax.random.key(1), SchedulerConfig()
    noise = jax.random.normal(jax.random.split(key, 3)[0], latents.shape)
    abar = jnp.asarray(DDIMScheduler(config).alphas_cumprod)
    wrong = jnp.zeros(latents.shape).at[:, 1, 0, 1].set(1.0)
    weights = jnp.ones(latents.shape[:-1]).at[:, 1, 0, 1].set(9.0)

    def denoiser(x, t):
        return jnp.sqrt(abar[t]).reshape(-1, 1, 1, 1, 1) * noise + wrong

    assert float(v_prediction(denoiser, latents, key, config)[0]) == pytest.approx(1 / 8, rel=1e-4)
    assert float(v_prediction(denoiser, latents, key, config, weights=weights)[0]) == pytest.approx(9 / 16, rel=1e-4)


def test_captions_are_dropped_at_the_rate():
    ids = jnp.arange(1, 20001)[:, None] * jnp.ones((1, 3), jnp.int32)
    empty = jnp.array([-1, -2, -3])
    out = np.asarray(drop_captions(ids, empty, 0.1, jax.random.key(0)))
    dropped = (out == np.asarray(empty)).all(1)
    assert 0.09 < dropped.mean() < 0.11
    assert np.array_equal(out[~dropped], np.asarray(ids)[~dropped])


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


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_means_over_parts_of_a_batch_do_not_count_batches_without_any(tmp_path, accumulate):
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
    train({"transformer": jnp.zeros(())}, None, loss, batches, config, tmp_path)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["noisy"] == 8 and "none" not in line
    assert line["loss"] == pytest.approx((64 + 1 + 4 + 16) / 4)


def test_a_small_batch_may_have_no_noisy_clip():
    _, logged = v_prediction(
        lambda x, t: jnp.zeros_like(x), jnp.ones((1, 1, 2, 2, 16)), jax.random.key(0), SchedulerConfig()
    )
    assert sorted(float(logged[name].count) for name in ("loss_noisy", "loss_clean")) == [0, 1]
    assert sum(np.isnan(float(logged[name])) for name in ("loss_noisy", "loss_clean")) == 1
