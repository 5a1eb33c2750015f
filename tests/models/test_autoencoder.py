"""The video autoencoder against diffusers, through the converter: chunks, tiles, precision, memory."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import load_vae
from cogvideox_flax.conversion.mapping import weight_moves
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.autoencoder import DECODE_CHUNK, ENCODE_CHUNK, Autoencoder, chunk_sizes
from cogvideox_flax.models.cogvideox.config import VAEConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.tiling import Tiling
from tests.support.reference import ROUNDING_BAR, SHARED, convert_component, make_vae, relative_error, rms_error
from tests.support.released_layout import build

FLOAT32_BAR = 1e-4  # of the output's standard deviation

RELEASED = {"block_out_channels": (128, 256, 256, 512), "norm_num_groups": 32}
TINY = VAEConfig(block_channels=(8, 16, 16, 32), layers_per_block=1, norm_groups=4)

# One jit for all tests: a program is compiled once per shape.
encode = jax.jit(
    lambda vae, video, tiling, slicing: vae.encode(video, tiling=tiling, slicing=slicing), static_argnums=(2, 3)
)
decode = jax.jit(lambda vae, z, tiling, slicing: vae.decode(z, tiling=tiling, slicing=slicing), static_argnums=(2, 3))
step = jax.jit(lambda part, x, cache: part(x, cache))


def by_chunks(part, x, size):
    """A clip through the encoder or decoder by hand, chunk after chunk."""
    ys, cache, start = [], None, 0
    for n in chunk_sizes(x.shape[1], size):
        y, cache = step(part, x[:, start : start + n], cache)
        ys.append(y)
        start += n
    return jnp.concatenate(ys, 1)


def to_torch(x, dtype=torch.float32):
    return torch.tensor(np.asarray(x)).permute(0, 4, 1, 2, 3).to(dtype)


def from_torch(x):
    return x.permute(0, 2, 3, 4, 1).float().numpy()


def reference_decode(vae, z, dtype=torch.float32):
    return from_torch(vae.to(dtype).decode(to_torch(z, dtype)).sample)


def reference_encode(vae, video, dtype=torch.float32):
    posterior = vae.to(dtype).encode(to_torch(video, dtype)).latent_dist
    return from_torch(posterior.mean), from_torch(posterior.logvar)


def latent(frames, height, width, batch=1, seed=1):
    return np.random.default_rng(seed).normal(size=(batch, frames, height, width, 16)).astype(np.float32)


def clip(frames, height, width, batch=1, seed=2):
    return np.random.default_rng(seed).uniform(-1, 1, size=(batch, frames, height, width, 3)).astype(np.float32)


def make_pair(folder, dtype=None, **changes):
    reference = make_vae(**changes)
    return reference, load_vae(convert_component("vae", reference, folder), dtype=dtype)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One ResNet per block, so that blocks that change the width have no stack."""
    return make_pair(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def deep_pair(tmp_path_factory):
    """As many ResNets per block as the releases have."""
    return make_pair(tmp_path_factory.mktemp("deep"), layers_per_block=3)


# Parity, whole images


@pytest.mark.parametrize("frames", range(1, 8))
def test_decoder_float32(pair, frames):
    reference, vae = pair
    z = latent(frames, 2, 3)
    assert relative_error(by_chunks(vae.decoder, z, DECODE_CHUNK), reference_decode(reference, z)) < FLOAT32_BAR


@pytest.mark.parametrize("frames", range(1, 21))
def test_encoder_float32(pair, frames):
    reference, vae = pair
    video = clip(frames, 16, 24)
    mean, logvar = jnp.split(by_chunks(vae.encoder, video, ENCODE_CHUNK), 2, -1)
    expected = reference_encode(reference, video)
    assert relative_error(mean, expected[0]) < FLOAT32_BAR
    assert relative_error(logvar.clip(-30, 20), expected[1]) < FLOAT32_BAR


@pytest.mark.parametrize("frames", [4, 5])
def test_decode_is_the_decoder_chunk_by_chunk(pair, frames):
    reference, vae = pair
    z = latent(frames, 2, 3)
    video = decode(vae, z, None, False)
    assert relative_error(video, by_chunks(vae.decoder, z, DECODE_CHUNK)) < ROUNDING_BAR
    assert relative_error(video, reference_decode(reference, z)) < FLOAT32_BAR


def test_encode_is_the_encoder_chunk_by_chunk(pair):
    reference, vae = pair
    video = clip(17, 16, 24)
    mean, logvar = encode(vae, video, None, False)
    moments = by_chunks(vae.encoder, video, ENCODE_CHUNK)
    assert relative_error(jnp.concatenate([mean, logvar], -1), moments) < ROUNDING_BAR
    for ours, theirs in zip((mean, logvar), reference_encode(reference, video), strict=True):
        assert relative_error(ours, theirs) < FLOAT32_BAR


def test_three_resnets_per_block(deep_pair):
    reference, vae = deep_pair
    z, video = latent(5, 3, 2), clip(9, 24, 16)
    assert relative_error(by_chunks(vae.decoder, z, DECODE_CHUNK), reference_decode(reference, z)) < FLOAT32_BAR
    mean = jnp.split(by_chunks(vae.encoder, video, ENCODE_CHUNK), 2, -1)[0]
    assert relative_error(mean, reference_encode(reference, video)[0]) < FLOAT32_BAR


def test_logvar_is_clamped(pair):
    _, vae = pair
    loud = jax.tree.map(jnp.array, vae)
    loud.encoder.conv_out.bias[...] = jnp.linspace(-100, 100, 32)
    _, logvar = encode(loud, clip(17, 16, 24), None, False)
    assert logvar.min() >= -30 and logvar.max() == 20


def test_slicing_gives_the_same_numbers(pair):
    reference, vae = pair
    z, video = latent(3, 2, 3, batch=2), clip(9, 16, 24, batch=2)
    assert relative_error(decode(vae, z, None, True), reference_decode(reference, z)) < FLOAT32_BAR
    assert relative_error(decode(vae, z, None, False), reference_decode(reference, z)) < FLOAT32_BAR
    assert relative_error(encode(vae, video, None, True)[0], reference_encode(reference, video)[0]) < FLOAT32_BAR


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
def test_released_widths(layers, tmp_path):
    reference, vae = make_pair(tmp_path, layers_per_block=layers, **RELEASED)
    z, video = latent(5, 3, 4), clip(17, 24, 32)
    expected, (mean, logvar) = reference_decode(reference, z), reference_encode(reference, video)
    assert relative_error(decode(vae, z, None, False), expected) < FLOAT32_BAR
    ours = encode(vae, video, None, False)
    assert relative_error(ours[0], mean) < FLOAT32_BAR and relative_error(ours[1], logvar) < FLOAT32_BAR

    narrow = load_vae(tmp_path / "native", dtype="bfloat16")
    theirs = rms_error(reference_decode(reference, z, torch.bfloat16), expected)
    assert rms_error(decode(narrow, z, None, False).astype(jnp.float32), expected) <= theirs
    theirs = rms_error(reference_encode(reference, video, torch.bfloat16)[0], mean)
    assert rms_error(encode(narrow, video, None, False)[0].astype(jnp.float32), mean) <= theirs


@pytest.mark.parametrize("seed", [0, 1])
def test_bfloat16_no_worse_than_torch(seed, tmp_path):
    reference, vae = make_pair(tmp_path, dtype="bfloat16", seed=seed)
    z, video = latent(3, 3, 4), clip(9, 24, 32)
    expected, moments = reference_decode(reference, z), reference_encode(reference, video)
    ours = decode(vae, z, None, False)
    assert ours.dtype == jnp.bfloat16
    theirs = reference_decode(reference, z, torch.bfloat16)
    assert rms_error(ours.astype(jnp.float32), expected) <= rms_error(theirs, expected)
    ours = encode(vae, video, None, False)
    theirs = reference_encode(reference, video, torch.bfloat16)
    for a, b, exact in zip(ours, theirs, moments, strict=True):
        assert rms_error(a.astype(jnp.float32), exact) <= rms_error(b, exact)


# Chunks


@pytest.mark.parametrize(
    ("n", "size", "sizes"),
    [(1, 2, [1]), (2, 2, [2]), (3, 2, [3]), (4, 2, [2, 2]), (13, 2, [3, 2, 2, 2, 2, 2]), (7, 8, [7]), (20, 8, [12, 8])],
)
def test_chunk_sizes(n, size, sizes):
    assert chunk_sizes(n, size) == sizes


def test_frame_counts():
    vae = jax.eval_shape(lambda: Autoencoder(TINY, rngs=nnx.Rngs(0)))
    for frames in (1, 2, 3, 4, 5, 12, 13):
        video = jax.eval_shape(lambda vae, z: vae.decode(z), vae, jnp.zeros((1, frames, 1, 1, 16)))
        assert video.shape == (1, 4 * (frames - 1) + 1 if frames % 2 else 4 * frames, 8, 8, 3)
    for frames in (1, 2, 4, 5, 8, 9, 11, 12, 13, 16, 17, 48, 49):
        mean, logvar = jax.eval_shape(lambda vae, video: vae.encode(video), vae, jnp.zeros((1, frames, 8, 8, 3)))
        assert mean.shape == logvar.shape == (1, -(-frames // 4), 1, 1, 16)


def test_a_longer_clip_is_no_longer_program():
    vae = jax.eval_shape(lambda: Autoencoder(TINY, rngs=nnx.Rngs(0)))

    def convolutions(frames):
        text = jax.jit(lambda vae, z: vae.decode(z)).lower(vae, jnp.zeros((1, frames, 2, 2, 16))).as_text()
        return text.count("stablehlo.convolution")

    assert convolutions(21) == convolutions(5) == 2 * convolutions(3)


# Tiles


def tile(reference, tiling):
    """Set the reference to the same tiles; its own setter takes no overlap of zero."""
    reference.enable_tiling(tiling.height, tiling.width)
    reference.tile_overlap_factor_height = tiling.overlap_height
    reference.tile_overlap_factor_width = tiling.overlap_width


TILED = {
    "official overlap, cut at both edges": (Tiling(48, 40), 3, 11, 9),
    "higher than a tile only, overlap of a half": (Tiling(32, 32, 0.5, 0.0), 1, 8, 4),
    "edge to edge, two chunks": (Tiling(32, 32, 0.0, 0.0), 5, 8, 4),
}


@pytest.mark.parametrize("case", TILED)
def test_tiled_decode(pair, case):
    reference, vae = pair
    tiling, frames, height, width = TILED[case]
    z = latent(frames, height, width)
    whole = reference_decode(reference, z)
    tile(reference, tiling)
    try:
        expected = reference_decode(reference, z)
    finally:
        reference.disable_tiling()
    assert rms_error(expected, whole) > 0.01, "the reference did not tile"
    assert relative_error(decode(vae, z, tiling, False), expected) < FLOAT32_BAR


def test_tiled_encode(pair):
    reference, vae = pair
    tiling, video = Tiling(48, 40), clip(9, 88, 72)
    tile(reference, tiling)
    try:
        expected = reference_encode(reference, video)
    finally:
        reference.disable_tiling()
    for ours, theirs in zip(encode(vae, video, tiling, False), expected, strict=True):
        assert relative_error(ours, theirs) < FLOAT32_BAR


def test_an_image_of_one_tile_is_not_tiled():
    vae = jax.eval_shape(lambda: Autoencoder(TINY, rngs=nnx.Rngs(0)))

    def program(height, width, tiling):
        z = jnp.zeros((1, 3, height, width, 16))
        return str(jax.make_jaxpr(lambda vae, z: vae.decode(z, tiling=tiling))(vae, z))

    assert program(6, 5, Tiling(48, 40)) == program(6, 5, None)
    assert program(6, 6, Tiling(48, 40)) != program(6, 6, None)


def test_official_tiles():
    config = VAEConfig()
    tiling = config.tiling
    tiling.check(config.spatial_compression)
    decode_layout, encode_layout = tiling.decode_layout(8), tiling.encode_layout(8)
    assert decode_layout == ((30, 25, 40, 200), (45, 36, 72, 288))
    assert encode_layout == ((240, 200, 5, 25), (360, 288, 9, 36))


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (Tiling(32, 40), r"height: got 32 pixels with overlap 0.1667, so tiles overlap by 5.333 .* height .* is 48"),
        (Tiling(48, 48), r"width: got 48 pixels with overlap 0.2, so tiles overlap by 9.6 .* width .* is 40"),
        (Tiling(48, 44), r"width: got 44 pixels, expected a positive multiple of 8"),
        (Tiling(48, 40, overlap_height=1.0), r"overlap_height: got 1.0, expected at least 0 and below 1"),
        (Tiling(48, 40, overlap_width=0.123), r"tiles overlap by 4.92 pixels; expected a multiple of 8: try another"),
    ],
)
def test_tiles_that_do_not_add_up_are_refused(tiling, message):
    vae = jax.eval_shape(lambda: Autoencoder(TINY, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match=message):
        vae.decode(jnp.zeros((1, 1, 2, 2, 16)), tiling=tiling)
    with pytest.raises(InputError, match=message):
        vae.encode(jnp.zeros((1, 1, 16, 16, 3)), tiling=tiling)


# What is refused


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 9, 16, 16), r"shape \(1, 9, 16, 16\); expected \[batch, frames, height, width, channels\], 3 channels"),
        ((1, 9, 16, 16, 4), "3 channels"),
        ((1, 9, 20, 16, 3), "20x16 .* multiples of 8"),
        ((1, 9, 16, 20, 3), "16x20 .* multiples of 8"),
        ((1, 0, 16, 16, 3), "empty"),
    ],
)
def test_encode_refuses(shape, message):
    vae = jax.eval_shape(lambda: Autoencoder(TINY, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match=message):
        vae.encode(jnp.zeros(shape))


@pytest.mark.parametrize(("shape", "message"), [((1, 16, 3, 4, 4), "16 channels"), ((0, 3, 4, 4, 16), "empty")])
def test_decode_refuses(shape, message):
    vae = jax.eval_shape(lambda: Autoencoder(TINY, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match=message):
        vae.decode(jnp.zeros(shape))


# Images split over devices


@pytest.mark.parametrize(
    ("mesh", "batch", "height", "width"),
    [
        ((2, 1, 2), 2, 4, 3),
        pytest.param((2, 3, 1), 1, 8, 12, marks=pytest.mark.further),
        pytest.param((1, 4, 1), 1, 8, 12, marks=pytest.mark.further),
        pytest.param((8, 1, 1), 1, 8, 12, marks=pytest.mark.further),
    ],
    ids=str,
)
def test_images_split_over_devices(pair, mesh, batch, height, width):
    """Clips and rows, rows and columns, rows alone."""
    z, video = latent(3, height, width, batch), clip(9, 8 * height, 8 * width, batch)
    expected = decode(pair[1], z, None, False), encode(pair[1], video, None, False)
    with jax.set_mesh(sharding.make_mesh(*mesh)):
        found = decode(pair[1], z, None, False), encode(pair[1], video, None, False)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert relative_error(ours, theirs) < FLOAT32_BAR


# The mapping table


def released_shapes():
    with torch.device("meta"):
        module = build("vae", "cogvideox-2b", small=False)
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_table_takes_every_released_tensor():
    shapes = released_shapes()
    assert len(weight_moves(CogVideoX, "vae", VAEConfig(), shapes).moves) == len(shapes) == 436


@pytest.mark.skipif(not (SHARED / "spec" / "keys" / "vae.txt").exists(), reason="needs the shared key list")
def test_table_takes_the_listed_keys():
    lines = (SHARED / "spec" / "keys" / "vae.txt").read_text().splitlines()
    shapes = {name: tuple(map(int, re.findall(r"\d+", shape))) for name, shape in (line.split("\t") for line in lines)}
    assert shapes == released_shapes()


@pytest.mark.slow
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])
def test_every_clip_length_as_users_compile_it(pair, tiled):
    """Latent counts 1 to 7 and frame counts 1 to 20 through the public calls, with the compiler's own optimisation. In
    tiles some of them: a tile is cut in time as the whole image is, and each length compiles four tiles."""
    reference, vae = pair
    decoded, encoded = ((1, 2, 3, 6), (1, 2, 9, 12)) if tiled else (range(1, 8), range(1, 21))
    tiling = Tiling(height=48, width=64, overlap_height=1 / 6, overlap_width=1 / 4) if tiled else None
    height, width = (7, 9) if tiled else (2, 3)  # latent pixels; 2 x 2 tiles of 6 x 8, smaller at the edges
    if tiled:
        reference.enable_tiling(48, 64, 1 / 6, 1 / 4)
    try:
        for frames in decoded:
            z = latent(frames, height, width)
            ours = jax.jit(partial(Autoencoder.decode, tiling=tiling))(vae, z)
            assert relative_error(ours, reference_decode(reference, z)) < FLOAT32_BAR, f"{frames} latents"
        for frames in encoded:
            video = clip(frames, 8 * height, 8 * width)
            ours = jax.jit(partial(Autoencoder.encode, tiling=tiling))(vae, video)
            for our, their in zip(ours, reference_encode(reference, video), strict=True):
                assert relative_error(our, their) < FLOAT32_BAR, f"{frames} frames"
    finally:
        reference.disable_tiling()
