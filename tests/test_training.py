"""The training loop and what it is made of; on real modules where that is quick, on small functions where it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from reference import relative_error

from cogvideox_flax import hub, sharding
from cogvideox_flax.checkpoint import parameters, read_manifest
from cogvideox_flax.config import SchedulerConfig, TextEncoderConfig, TransformerConfig, VAEConfig
from cogvideox_flax.errors import DivergedError, InputError
from cogvideox_flax.models.autoencoder import Autoencoder
from cogvideox_flax.models.text_encoder import TextEncoder
from cogvideox_flax.models.transformer import Transformer
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.tokenizer import Tokenizer
from cogvideox_flax.training import world
from cogvideox_flax.training.embedded.autoencoder import standardise
from cogvideox_flax.training.embedded.diffusion import repeated
from cogvideox_flax.training.embedded.settings import Run
from cogvideox_flax.training.loop import LoopConfig, train
from cogvideox_flax.training.metrics import plot_metrics, read_metrics
from cogvideox_flax.training.objectives import Focus, drop_captions, reconstruction, v_prediction
from cogvideox_flax.training.optimizer import OptimizerConfig, _decayed, learning_rate, make_optimizer
from cogvideox_flax.training.order import examples_of_step
from cogvideox_flax.training.store import Store, prepare
from cogvideox_flax.training.vocabulary import word_model

TEXT = TextEncoderConfig(vocab_size=32, width=32, layers=1, heads=2, head_dim=16, mlp_width=32)
SMALL = TransformerConfig(
    layers=2, heads=2, head_dim=16, text_width=32, text_length=4, time_width=16, rotary=True, sample_height=4,
    sample_width=4, sample_frames=5,
)  # fmt: skip


# --- objectives


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


# --- optimiser


def test_learning_rate_warms_up_and_decays():
    config = OptimizerConfig(learning_rate=1e-3, final_learning_rate=1e-5, warmup_steps=10)
    rates = [float(learning_rate(config, 100)(step)) for step in range(100)]
    assert np.argmax(rates) == 10 and rates[10] == pytest.approx(1e-3)
    assert 0 < rates[0] < 2e-4 and rates[99] == pytest.approx(1e-5, rel=0.1)
    assert (np.diff(rates[:11]) > 0).all() and (np.diff(rates[10:]) < 0).all()


def test_only_kernels_and_embeddings_decay():
    mask = parameters(_decayed({"t": Transformer(SMALL, rngs=nnx.Rngs(0)), "e": TextEncoder(TEXT, rngs=nnx.Rngs(0))}))
    decayed = {name for name, value in mask.items() if value}
    assert all(name.endswith(("kernel", "embedding")) for name in decayed)
    assert not any(name.endswith("kernel") for name in set(mask) - decayed)


def test_muon_steps_are_orthogonal_where_they_should_be():
    model = {"transformer": jax.tree.map(jnp.asarray, Transformer(SMALL, rngs=nnx.Rngs(0)))}
    config = OptimizerConfig(kind="muon", learning_rate=0.01, warmup_steps=0, weight_decay=0.0, clip_norm=1e9)
    optimizer = make_optimizer(config, 10)
    noise = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: jnp.asarray(noise.normal(size=x.shape) ** 3, jnp.float32), model)
    steps, _ = optimizer.update(gradients, optimizer.init(model), model)
    moved = {name: np.asarray(step) for name, step in parameters(steps["transformer"]).items()}
    for name in ("blocks.attn.q.kernel", "blocks.mlp.down.kernel"):  # each layer by itself
        for layer in moved[name]:
            singular = np.linalg.svd(layer, compute_uv=False)
            assert singular[0] < 2 * singular[-3], name  # the very smallest of a square matrix take more iterations
            assert np.sqrt(np.square(layer).mean()) == pytest.approx(0.2 * 0.01, rel=0.3)  # as large as AdamW's
    for name in ("blocks.attn.q.bias", "blocks.norm1.linear.kernel", "patch_embed.kernel"):
        sizes = abs(moved[name])  # Adam's first step is of one size; Nesterov's momentum makes it half as long again
        assert 0.01 < sizes.max() < 0.015 and np.percentile(sizes, 5) > 0.999 * sizes.max()


def test_settings_are_checked_together():
    with pytest.raises(InputError, match=r"(?s)learning_rate.*b1.*clip_norm"):
        OptimizerConfig(learning_rate=0, b1=1.0, clip_norm=-1)
    with pytest.raises(InputError, match=r"(?s)steps.*accumulate.*dtype"):
        LoopConfig(steps=0, accumulate=0, dtype="float16")


# --- data order and store


def test_every_epoch_shows_every_example_once_in_a_new_order():
    seen = np.concatenate([examples_of_step(step, batch=4, count=10, seed=1) for step in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert not np.array_equal(seen[:10], seen[10:])
    assert np.array_equal(examples_of_step(3, batch=4, count=10, seed=1), seen[12:16])
    assert not np.array_equal(examples_of_step(0, batch=10, count=10, seed=2), seen[:10])


def test_store_goes_on_where_it_stopped(tmp_path):
    made = []

    def make(indices):
        made.append(indices)
        if len(made) == 3:
            raise RuntimeError("power cut")
        return {"x": np.arange(indices.start, indices.stop, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)}

    with pytest.raises(RuntimeError):
        prepare(tmp_path, 10, make, shard_size=3, meta={"vae": "a"})
    store = prepare(tmp_path, 10, make, shard_size=3, meta={"vae": "a"})
    assert [m.start for m in made] == [0, 3, 6, 6, 9]
    assert len(store) == 10
    assert np.array_equal(Store(tmp_path).gather(np.array([9, 0, 4]))["x"][:, 0], [9, 0, 4])
    with pytest.raises(InputError, match="vae"):
        prepare(tmp_path, 10, make, shard_size=3, meta={"vae": "b"})


def test_vocabulary_is_one_token_per_word(tmp_path):
    path = tmp_path / "spiece.model"
    path.write_bytes(word_model(["a", "red", "circle", "moves"]))
    tokenizer = Tokenizer(path, 12, vocab_size=128)
    (ids,) = tokenizer(["A red circle moves!"])
    assert (ids != 0).sum() == 5 and ids[4] == 1 and 2 not in ids
    assert np.array_equal(tokenizer(["a  RED circle, moves"])[0], ids)
    (letters,) = tokenizer(["red fox"])
    assert letters[0] == ids[1] and (letters != 0).sum() == 1 + 1 + 3 + 1 and 2 not in letters  # red ▁ f o x </s>
    assert path.read_bytes() == word_model(["moves", "circle", "red", "a", "a"])


# --- the loop


def pull(params, _, batch, key):
    """Least squares towards the batch, with noise that depends on the key."""
    error = params["transformer"]["blocks.attn.q.bias"] - batch["x"]
    noise = 1e-3 * jax.random.normal(key, batch["x"].shape)
    return jnp.square(error + noise).mean(), {"worst": abs(error).max()}


def some_batches(step):
    return {"x": np.random.default_rng(step).normal(1.0, 0.1, size=(4, 2, 8)).astype(np.float32)}


START = {"transformer": {"blocks.attn.q.bias": np.zeros((2, 8), np.float32)}}
QUICK = LoopConfig(steps=30, ema_decay=0.9, log_every=1, optimizer=OptimizerConfig(learning_rate=0.1, warmup_steps=3))


def bias(tree):
    return np.asarray(tree["transformer"]["blocks.attn.q.bias"])


def test_training_reaches_the_target(tmp_path):
    state = train(START, None, pull, some_batches, replace(QUICK, steps=100), tmp_path)
    assert int(state.step) == 100
    assert abs(bias(state.params) - 1).max() < 0.1 and abs(bias(state.ema) - 1).max() < 0.1
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert lines[-1]["loss"] < 0.05 < lines[0]["loss"]
    plot_metrics([tmp_path / "metrics.jsonl"], ["loss", "learning_rate"], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000
    with pytest.raises(InputError, match="no metric 'nothing'"):
        plot_metrics([tmp_path / "metrics.jsonl"], ["nothing"], tmp_path / "loss.png")


def test_stopped_and_resumed_is_the_same_run(tmp_path):
    whole = train(START, None, pull, some_batches, QUICK, tmp_path / "whole")
    halted = train(START, None, pull, some_batches, QUICK, tmp_path / "cut", stop_after=lambda step: step == 11)
    assert int(halted.step) == 11
    resumed = train(START, None, pull, some_batches, QUICK, tmp_path / "cut")
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        assert np.array_equal(ours, theirs)
    losses = [[line["loss"] for line in read_metrics(tmp_path / run / "metrics.jsonl")] for run in ("whole", "cut")]
    assert losses[0] == losses[1]
    again = train(START, None, pull, some_batches, QUICK, tmp_path / "cut")  # done: nothing more to do
    assert np.array_equal(bias(again.params), bias(whole.params))


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    train(START, None, pull, some_batches, QUICK, tmp_path, stop_after=lambda step: step == 2)
    with pytest.raises(InputError, match="steps: there 30, now 31"):
        train(START, None, pull, some_batches, replace(QUICK, steps=31), tmp_path)


def test_divergence_is_reported_and_not_saved(tmp_path):
    def poison(step):
        return {"x": np.full((4, 2, 8), np.nan if step == 6 else 1.0, np.float32)}

    with pytest.raises(DivergedError, match="step 7"):
        train(START, None, pull, poison, replace(QUICK, save_minutes=1e-9), tmp_path)
    assert (tmp_path / "states" / "6").is_dir() and not (tmp_path / "states" / "7").exists()


def test_accumulated_gradients_are_the_whole_batch(tmp_path):
    def plain(params, _, batch, key):
        return jnp.square(params["transformer"]["blocks.attn.q.bias"] - batch["x"]).mean(), {}

    one = train(START, None, plain, some_batches, QUICK, tmp_path / "one")
    four = train(START, None, plain, some_batches, replace(QUICK, accumulate=4), tmp_path / "four")
    np.testing.assert_allclose(bias(four.params), bias(one.params), atol=1e-5)
    with pytest.raises(InputError, match="batch of 4 does not divide into 3"):
        train(START, None, plain, some_batches, replace(QUICK, accumulate=3), tmp_path / "three")


def denoise(params, _, batch, key):
    def model(x, t):
        return params["transformer"](x, params["text_encoder"](batch["ids"]), t, remat=True)

    return v_prediction(model, batch["latents"].astype(jnp.float32), key, SchedulerConfig())


def denoise_batches(step):
    rng = np.random.default_rng(step)
    latents = rng.normal(size=(4, 2, 4, 4, 16)).astype(np.float32)
    return {"latents": latents, "ids": rng.integers(3, 32, (4, 4)).astype(np.int32)}


def models():
    # zero-initialised layers would hide what is behind them
    noise = np.random.default_rng(0)
    fresh = {"text_encoder": TextEncoder(TEXT, rngs=nnx.Rngs(1)), "transformer": Transformer(SMALL, rngs=nnx.Rngs(2))}
    return jax.tree.map(lambda x: x + 0.05 * noise.normal(size=x.shape).astype(np.float32), fresh)


SHORT = LoopConfig(steps=3, log_every=1, ema_decay=0.5, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(models(), None, denoise, denoise_batches, SHORT, tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 1, 2, True)], ids=str)
def test_sharded_training_is_the_same(tmp_path, trained, shape):
    mesh = sharding.make_mesh(*shape)
    sharded = train(models(), None, denoise, denoise_batches, SHORT, tmp_path, mesh=mesh)
    q = sharded.opt_state[1][0].mu["transformer"].blocks.attn.q.kernel[...]
    stored = ("dp", "sp") if len(shape) > 3 else None
    assert tuple(q.sharding.spec) == (None, stored, "tp")  # the moments lie where their parameter lies
    for name, value in parameters(sharded.params).items():
        np.testing.assert_allclose(value, parameters(trained.params)[name], atol=3e-5, err_msg=name)
    resumed = train(models(), None, denoise, denoise_batches, SHORT, tmp_path, mesh=mesh)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(sharded), strict=True):
        assert np.array_equal(ours, theirs) and ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


def test_bfloat16_trains_float32_weights(tmp_path, trained):
    state = train(models(), None, denoise, denoise_batches, replace(SHORT, dtype="bfloat16"), tmp_path)
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"float32"}
    start, full, half = (parameters(tree) for tree in (models(), trained.params, state.params))
    moved = [np.asarray(x[n] - start[n]).ravel() for x in (full, half) for n in sorted(start)]
    full_way, half_way = np.concatenate(moved[: len(start)]), np.concatenate(moved[len(start) :])
    assert 0.7 < np.corrcoef(full_way, half_way)[0, 1] < 0.99999  # the same way, at another precision


def test_remat_changes_nothing():
    model, batch = models()["transformer"], denoise_batches(0)
    context = np.random.default_rng(1).normal(size=(4, 4, 32)).astype(np.float32)

    def loss(model, remat):
        return jnp.square(model(batch["latents"], context, 500, remat=remat)).mean()

    kept, again = (jax.jit(jax.grad(partial(loss, remat=remat)))(model) for remat in (False, True))
    for name, value in parameters(kept).items():
        np.testing.assert_allclose(parameters(again)[name], value, rtol=1e-3, atol=1e-6, err_msg=name)


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {root!r}]
os.environ["JAX_PLATFORMS"] = "cpu"
from dataclasses import replace
from pathlib import Path
import test_training as t

def die(step, state):
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

config = replace(t.SHORT, steps=6, save_minutes=1e-9)
t.train(t.models(), None, t.denoise, t.denoise_batches, config, Path(sys.argv[1]), on_step=die)
"""


def test_killed_and_resumed_is_bit_identical(tmp_path):
    tests = Path(__file__).parent
    code = KILLED.format(tests=str(tests), root=str(tests.parent))

    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}  # one program, compiled once

    def run(folder, die_at):
        command = [sys.executable, "-c", code, folder, str(die_at)]
        return subprocess.run(command, capture_output=True, text=True, env=env)

    assert run(tmp_path / "cut", 4).returncode == -signal.SIGKILL
    for folder in ("cut", "whole"):
        done = run(tmp_path / folder, 0)
        assert done.returncode == 0, done.stderr
    states = []
    for folder in ("cut", "whole"):
        config = replace(SHORT, steps=6, save_minutes=1e-9)
        states.append(train(models(), None, denoise, denoise_batches, config, tmp_path / folder))
    assert int(states[0].step) == 6
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.array_equal(ours, theirs)
    steps = [line["step"] for line in read_metrics(tmp_path / "cut" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_settings_are_kept_beside_the_run(tmp_path):
    train(START, None, pull, some_batches, QUICK, tmp_path, stop_after=lambda step: step == 1)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["steps"] == 30 and settings["optimizer"]["learning_rate"] == 0.1


def test_hard_clips_are_shown_more_often():
    scenes = [world.tracks_of_clip(3, i)[0] for i in range(200)]
    shown = np.bincount(repeated(scenes, 4), minlength=200)
    prompts = [world.describe(scene, np.random.default_rng(0)) for scene in scenes]
    assert all("square" in prompt for prompt, n in zip(prompts, shown, strict=True) if n == 4)
    assert set(shown) == {1, 4} and 0.1 < (shown == 4).mean() < 0.3
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
