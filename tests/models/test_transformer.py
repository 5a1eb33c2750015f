"""The 3D transformer against diffusers, through the converter, for every release's architecture."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline
from flax import nnx

from cogvideox_flax import attention, sharding
from cogvideox_flax.attention import TileSizes
from cogvideox_flax.checkpoint import load_transformer
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.nn.layers import MLP
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.nn.stack import same_arrays
from tests.support.reference import ARCHITECTURES, convert_component, make_transformer, relative_error, rms_error

FLOAT32_BAR = 1e-4  # of the output's standard deviation


class Rope:
    """Just enough of a pipeline to borrow the reference's rotary tables, with the cap on 1.5's size lifted."""

    vae_scale_factor_spatial = 8
    vae_scale_factor_temporal = 4

    def __init__(self, transformer):
        self.transformer = transformer
        self.vae_scale_factor_spatial = 8

    def __call__(self, latents):
        config = dict(self.transformer.config)
        if config["patch_size_t"]:
            config |= {"sample_height": 300, "sample_width": 300}
        wide = type("Transformer", (), {"config": type("Config", (), config)()})()
        pipe = type("Pipe", (), {"transformer": wide, "vae_scale_factor_spatial": 8})()
        return CogVideoXPipeline._prepare_rotary_positional_embeddings(
            pipe, latents.shape[3] * 8, latents.shape[4] * 8, latents.shape[1], torch.device("cpu")
        )


def run_reference(model, latents, context, timestep, dtype=torch.float32):
    model = model.to(dtype)
    latents, context = (torch.tensor(x).to(dtype) for x in (latents, context))
    rotary = Rope(model)(latents) if model.config.use_rotary_positional_embeddings else None
    ofs = torch.full((1,), 2.0, dtype=dtype) if model.config.ofs_embed_dim else None
    with torch.no_grad():
        out = model(latents, context, torch.tensor(timestep), image_rotary_emb=rotary, ofs=ofs, return_dict=False)[0]
    return out.permute(0, 1, 3, 4, 2).float().numpy()


def run_ours(model, latents, context, timestep):
    ofs = 2.0 if model.config.ofs_width else None
    call = jax.jit(lambda m, x, c, t: m(x, c, t, ofs=ofs))
    return call(model, latents.transpose(0, 1, 3, 4, 2), context, jnp.array(timestep)).astype(jnp.float32)


def inputs(model, frames, height, width, seed=1):
    random = np.random.default_rng(seed)
    config = model.config
    latents = random.normal(size=(2, frames, config.in_channels, height, width)).astype(np.float32)
    context = random.normal(size=(2, config.max_text_seq_length, config.text_embed_dim)).astype(np.float32)
    return latents, context, [999, 321]


SIZES = {"sample": (4, 6), "portrait": (6, 4), "square": (10, 10), "wide": (6, 20)}


@pytest.mark.parametrize("release", ARCHITECTURES)
def test_float32(release, tmp_path):
    reference = make_transformer(release)
    model = load_transformer(convert_component("transformer", reference, tmp_path))
    for name, (height, width) in SIZES.items():
        if reference.config.use_learned_positional_embeddings and name != "sample":
            continue
        counts = (4, 2) if reference.config.patch_size_t else (3, 1)
        for frames in counts if name == "sample" else counts[:1]:
            args = inputs(reference, frames, height, width)
            error = relative_error(run_ours(model, *args), run_reference(reference, *args))
            assert error < FLOAT32_BAR, f"{name}, {frames} latent frames"


@pytest.mark.parametrize("release", ARCHITECTURES)
def test_bfloat16_no_worse_than_torch(release, tmp_path):
    reference = make_transformer(release, num_layers=4)
    native = convert_component("transformer", reference, tmp_path)
    args = inputs(reference, 4 if reference.config.patch_size_t else 3, *SIZES["sample"])
    exact = run_reference(reference, *args)
    ours = rms_error(run_ours(load_transformer(native, dtype="bfloat16"), *args), exact)
    theirs = rms_error(run_reference(reference, *args, dtype=torch.bfloat16), exact)
    assert ours <= theirs


@pytest.mark.slow
@pytest.mark.parametrize("release", ARCHITECTURES)
def test_released_width(release, tmp_path):
    heads = 30 if release == "cogvideox-2b" else 48
    changes = {"ofs_embed_dim": 512} if release.endswith("1.5-5b-i2v") else {}
    reference = make_transformer(
        release,
        num_attention_heads=heads,
        attention_head_dim=64,
        num_layers=2,
        text_embed_dim=4096,
        time_embed_dim=512,
        max_text_seq_length=226,
        **changes,
    )
    native = convert_component("transformer", reference, tmp_path)
    args = inputs(reference, 4 if reference.config.patch_size_t else 3, *SIZES["sample"])
    exact = run_reference(reference, *args)
    assert relative_error(run_ours(load_transformer(native), *args), exact) < FLOAT32_BAR
    ours = rms_error(run_ours(load_transformer(native, dtype="bfloat16"), *args), exact)
    theirs = rms_error(run_reference(reference, *args, dtype=torch.bfloat16), exact)
    assert ours <= theirs


def test_learned_positions_at_another_length_become_computed(tmp_path, caplog):
    reference = make_transformer("cogvideox-5b-i2v")
    model = load_transformer(convert_component("transformer", reference, tmp_path))
    args = inputs(reference, 2, *SIZES["sample"])
    assert relative_error(run_ours(model, *args), run_reference(reference, *args)) < FLOAT32_BAR
    assert "learned its positions for 9 frames" in caplog.text


@pytest.mark.parametrize(
    ("release", "shape", "context", "message"),
    [
        ("cogvideox-2b", (1, 3, 8, 12, 8), (1, 10, 40), "latents must be"),
        ("cogvideox-2b", (1, 3, 7, 12, 16), (1, 10, 40), "do not cut into patches"),
        ("cogvideox1.5-5b", (1, 3, 8, 12, 16), (1, 10, 40), "do not cut into patches"),
        ("cogvideox-2b", (1, 3, 8, 12, 16), (1, 10, 41), "context must be"),
        ("cogvideox-2b", (1, 3, 8, 12, 16), (1, 9, 40), "exactly 10 text tokens"),
        ("cogvideox1.5-5b-i2v", (1, 4, 8, 12, 32), (1, 10, 40), "needs ofs"),
    ],
)
def test_refuses(release, shape, context, message, tmp_path):
    model = load_transformer(convert_component("transformer", make_transformer(release), tmp_path))
    with pytest.raises(InputError, match=message):
        model(jnp.zeros(shape), jnp.zeros(context), 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    reference = make_transformer("cogvideox-5b")
    folder = tmp_path_factory.mktemp("seam")
    model = load_transformer(convert_component("transformer", reference, folder))
    latents, context, timestep = inputs(reference, 3, 8, 12)
    return model, (jnp.asarray(latents.transpose(0, 1, 3, 4, 2)), jnp.asarray(context), jnp.asarray(timestep))


def test_embed_blocks_and_head_are_the_call(model):
    """Three programs, and a fourth that skips the blocks: what a step cache runs."""
    model, args = model
    embed, run_blocks, head = (jax.jit(getattr(Transformer, name)) for name in ("embed", "run_blocks", "head"))
    tokens = embed(model, *args)
    assert tokens.length == 10 + 3 * 4 * 6 and tokens.text_length == 10 and tokens.grid == (3, 4, 6)
    out = run_blocks(model, tokens)
    np.testing.assert_allclose(head(model, out), jax.jit(Transformer.__call__)(model, *args), atol=1e-5)
    residual = out.x - tokens.x
    cached = dataclasses.replace(tokens, x=tokens.x + residual)
    np.testing.assert_allclose(head(model, cached), head(model, out), atol=1e-5)


def test_tokens_in_the_tiles_of_a_tpu_give_the_same(model):
    """10 + 72 tokens, and 6 of padding."""
    model, args = model
    with compiling_for("tpu"):
        tokens = jax.jit(Transformer.embed)(model, *args)
    assert tokens.x.shape[1] == 88 and tokens.length == 82
    run_blocks, head = (jax.jit(getattr(Transformer, name)) for name in ("run_blocks", "head"))
    expected = jax.jit(Transformer.__call__)(model, *args)
    np.testing.assert_allclose(head(model, run_blocks(model, tokens)), expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "xla"},
        {"backend": "triton", "interpret": True},
        {"backend": "splash", "interpret": True, "tile_sizes": TileSizes(128, 128, 128, 128)},
    ],
    ids=["xla", "triton", "splash"],
)
def test_attention_function_is_given_to_the_transformer(model, options):
    model, args = model
    seen = []

    def attend(q, k, v, **lengths):
        seen.append(k)
        return attention.attend(q, k, v, **lengths, **options)

    call = jax.jit(Transformer.__call__)
    expected = call(model, *args)
    other = same_arrays(model)
    other.attend = attend
    assert jax.tree.structure(other) != jax.tree.structure(model)  # so jit does not mistake one for the other
    np.testing.assert_allclose(call(other, *args), expected, atol=2e-5)
    assert len(seen) == 1  # traced once for all layers
    other.attend = partial(attention.attend, **options)
    np.testing.assert_allclose(call(other, *args), expected, atol=2e-5)


@pytest.mark.parametrize("shape", [(2, 2051, 8), (1, 6001, 8)])
def test_many_tokens_go_through_the_mlp_in_pieces_on_a_cpu(shape):
    """One is of pieces that divide the tokens, one is not; what is held at a time is a piece's."""
    mlp = MLP(8, rngs=nnx.Rngs(0))
    x, weight = (jax.random.normal(jax.random.key(i), shape) for i in range(2))
    at_once = jax.jit(MLP._all_tokens).lower(mlp, x).compile()
    in_pieces = jax.jit(MLP.__call__).lower(mlp, x).compile()
    np.testing.assert_allclose(in_pieces(mlp, x), at_once(mlp, x), atol=1e-6)
    held = [program.memory_analysis().temp_size_in_bytes for program in (in_pieces, at_once)]
    if jax.default_backend() == "cpu":
        assert held[0] < 0.8 * held[1]
    # a mesh shares the tokens out itself
    with jax.set_mesh(sharding.make_mesh(1, 2, 1)):
        assert "while" not in jax.jit(MLP.__call__).lower(mlp, x).as_text()
    forms = MLP.__call__, MLP._all_tokens
    found, expected = (jax.jit(jax.grad(lambda mlp, f=f: (weight * f(mlp, x)).sum()))(mlp) for f in forms)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))
