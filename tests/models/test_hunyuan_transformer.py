"""HunyuanVideo-1.5's transformer: against diffusers, in every precision and on every mesh."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from flax import nnx

from cogvideox_flax.checkpoint import load_component, parameters
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.lora.adapters import add_lora
from cogvideox_flax.models.hunyuan_video15.conditions import valid_first
from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig
from cogvideox_flax.models.hunyuan_video15.model import HunyuanVideo15
from cogvideox_flax.models.hunyuan_video15.sharding import TRANSFORMER
from cogvideox_flax.models.hunyuan_video15.transformer import Transformer
from cogvideox_flax.nn.quantized import quantize
from cogvideox_flax.sharding import make_mesh, parameter_axes
from tests.support.hunyuan_layout import build
from tests.support.reference import random, relative_error, rms_error
from tests.support.released_layout import randomise

BAR = 1e-4
GRID = 3, 4, 6
BATCH, TEXT, GLYPHS, IMAGE = 2, 11, 7, 5


def inputs(image: bool, seed: int = 0) -> dict[str, jax.Array]:
    """Two prompts of different length, the second without quoted text; masks with a hole as a stranger's could have."""
    text_mask = np.array([[1] * 9 + [0] * 2, [1, 0, 1, 1] + [0] * 7])
    glyph_mask = np.array([[1] * 4 + [0] * 3, [0] * 7])
    given = {
        "text": random(seed + 1, BATCH, TEXT, 32),
        "text_mask": jnp.asarray(text_mask, jnp.float32),
        "glyphs": random(seed + 2, BATCH, GLYPHS, 24),
        "glyph_mask": jnp.asarray(glyph_mask, jnp.float32),
    }
    return given | ({"image": random(seed + 3, BATCH, IMAGE, 20)} if image else {})


def torch_of(x: jax.Array) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


def run_reference(module, latents, timestep, given, dtype=torch.float32):
    next_timestep = given.get("next_timestep")
    image = torch_of(given["image"]) if "image" in given else torch.zeros(BATCH, IMAGE, 20)
    with torch.no_grad():
        out = module(
            torch_of(latents).permute(0, 4, 1, 2, 3).to(dtype),
            torch.tensor(timestep).to(dtype),
            encoder_hidden_states=torch_of(given["text"]).to(dtype),
            encoder_attention_mask=torch_of(given["text_mask"]).to(dtype),
            timestep_r=None if next_timestep is None else torch.tensor(next_timestep).to(dtype),
            encoder_hidden_states_2=torch_of(given["glyphs"]).to(dtype),
            encoder_attention_mask_2=torch_of(given["glyph_mask"]).to(dtype),
            image_embeds=image.to(dtype),
            return_dict=False,
        )[0]
    return out.float().permute(0, 2, 3, 4, 1).numpy()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "meanflow"])
def pair(request, tmp_path_factory):
    """(diffusers' model, the native directory of the same weights)."""
    folder = tmp_path_factory.mktemp("model")
    module = randomise(build("transformer", small=True, use_meanflow=request.param))
    module.save_pretrained(folder / "hf" / "transformer")
    convert(folder / "hf", folder / "native")
    return module, folder / "native"


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
def test_parity(pair, image):
    module, native = pair
    given, latents, timestep = inputs(image), random(0, BATCH, *GRID, 9), [987.654, 12.25]
    if module.config.use_meanflow:
        given["next_timestep"] = [900.5, 0.0]
    ours = jax.jit(lambda model, *args, **how: model(*args, **how))(
        load_component("transformer", native, "float32"), latents, jnp.array(timestep), **jax.tree.map(jnp.array, given)
    )
    theirs = run_reference(module, latents, timestep, given)
    assert ours.shape == theirs.shape == (BATCH, *GRID, 4)
    assert ours.dtype == jnp.float32
    assert relative_error(ours, theirs) < BAR


def test_bfloat16_is_no_worse_than_torch(pair):
    module, native = pair
    given, latents, timestep = inputs(True), random(0, BATCH, *GRID, 9), [500.0, 500.0]
    exact = run_reference(module, latents, timestep, given)
    rounded = HunyuanVideo15Transformer3DModel(**module.config)
    rounded.load_state_dict(module.state_dict())
    theirs = run_reference(rounded.to(torch.bfloat16), latents, timestep, given, torch.bfloat16)
    model = load_component("transformer", native, "bfloat16")
    ours = jax.jit(lambda model, *args, **how: model(*args, **how))(model, latents, jnp.array(timestep), **given)
    assert rms_error(ours, exact) <= rms_error(theirs, exact)


@pytest.mark.parametrize(
    "mesh",
    [
        (2, 2, 2),
        (1, 4, 2, True),
        pytest.param((2, 4, 1), marks=pytest.mark.further),
        pytest.param((1, 8, 1), marks=pytest.mark.further),
        pytest.param((1, 2, 2), marks=pytest.mark.further),
    ],
)
@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
def test_every_mesh(pair, mesh, image):
    """72 video tokens and 18 of the prompt divide over none of them in whole tiles."""
    _, native = pair
    assert relative_error(evaluated(native, image, make_mesh(*mesh)), evaluated(native, image)) < 1e-5


@jax.jit
def evaluate(model, latents, given):
    return model(latents, 500.0, **given)


@functools.cache
def evaluated(native, image, mesh=None):
    model = load_component("transformer", native, "float32", mesh)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        return evaluate(model, random(0, BATCH, *GRID, 9), inputs(image))


@pytest.mark.parametrize(
    "pair", [False, pytest.param(True, marks=pytest.mark.further)], indirect=True, ids=["plain", "meanflow"]
)
def test_blocks_in_two_parts_and_recomputed_blocks(pair):
    _, native = pair
    model = load_component("transformer", native, "float32")
    given, latents = inputs(True), random(0, BATCH, *GRID, 9)
    tokens = jax.jit(lambda model: model.embed(latents, 300.0, **given))(model)
    run = jax.jit(lambda model, tokens, **part: model.run_blocks(tokens, **part), static_argnames=("start", "stop"))
    by_parts = run(model, run(model, tokens, stop=1), start=1)
    whole = run(model, tokens)
    for a, b in zip(by_parts.x, whole.x, strict=True):
        assert relative_error(a, b) < 1e-5

    def loss(model, remat):
        return jnp.square(model(latents, 300.0, remat=remat, **given)).mean()

    gradient = jax.jit(jax.grad(loss, allow_int=True), static_argnums=1)
    plain, again = (gradient(model, remat) for remat in (False, "offload"))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(float(jnp.abs(a).max()), 1e-3))


def test_teacache_compares_the_first_modulated_input(pair):
    module, native = pair
    seen = []
    handle = module.transformer_blocks[0].norm1.register_forward_hook(lambda *args: seen.append(args[-1][0]))
    given, latents = inputs(True), random(0, BATCH, *GRID, 9)
    run_reference(module, latents, [300.0, 300.0], given)
    handle.remove()
    model = load_component("transformer", native, "float32")
    found = jax.jit(lambda model: model.teacache_signal(model.embed(latents, 300.0, **given)))(model)
    assert relative_error(found, seen[0].numpy()) < BAR


def test_tokens_that_are_not_attended_do_not_matter(pair):
    _, native = pair
    model = load_component("transformer", native, "float32")
    given, latents = inputs(False), random(0, BATCH, *GRID, 9)
    other = given | {
        name: jnp.where(given[mask][..., None] != 0, given[name], 100.0)
        for name, mask in (("text", "text_mask"), ("glyphs", "glyph_mask"))
    }
    np.testing.assert_array_equal(evaluate(model, latents, given), evaluate(model, latents, other))


def test_valid_first():
    x = jnp.arange(10.0).reshape(2, 5, 1)
    out, count = valid_first(x, jnp.array([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]))
    np.testing.assert_array_equal(out[..., 0], [[1, 3, 4, 0, 0], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(count, [3, 0])


def test_the_released_sizes():
    """As many tensors and parameters as the released checkpoints."""
    for meanflow, tensors in ((False, 1801), (True, 1805)):
        with torch.device("meta"):
            module = build("transformer", small=False, use_meanflow=meanflow)
        assert len(module.state_dict()) == tensors
        config = TransformerConfig.from_hf(dict(module.config))
        assert config == dataclasses.replace(TransformerConfig(), use_meanflow=meanflow)
        model = jax.eval_shape(lambda config=config: Transformer(config, rngs=nnx.Rngs(0)))
        count = sum(leaf.size for leaf in jax.tree.leaves(model))
        assert count == sum(p.numel() for p in module.parameters())
    assert abs(count / 8.327e9 - 1) < 0.005


def test_every_parameter_has_a_row(pair):
    """Of the weights, of adapters on all targets, and of quantized weights."""
    model = load_component("transformer", pair[1], "float32")
    everywhere = tuple(HunyuanVideo15.lora.targets)
    adapted = add_lora(HunyuanVideo15, model, rank=2, alpha=2.0, targets=everywhere, rngs=nnx.Rngs(0))
    for module in (model, adapted, quantize(model, HunyuanVideo15.components["transformer"].linear_maps, "int8")):
        for name in parameters(module):
            parameter_axes(TRANSFORMER, name)


def test_faults(pair, tmp_path):
    module, native = pair
    model = load_component("transformer", native, "float32")
    given, latents = inputs(False), random(0, BATCH, *GRID, 9)
    with pytest.raises(InputError, match=r"latents must be \[B, T, H, W, 9\]"):
        model(latents[..., :4], 1.0, **given)
    with pytest.raises(InputError, match=r"glyphs must be \[2, tokens, 24\]"):
        model(latents, 1.0, **given | {"glyphs": given["text"]})
    if not module.config.use_meanflow:
        with pytest.raises(InputError, match="takes one timestep"):
            model(latents, 1.0, next_timestep=0.0, **given)
    folder = tmp_path / "hf" / "transformer"
    module.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace("rms_norm", "layer_norm"))
    with pytest.raises(ConversionError, match=r"qk_norm: got 'layer_norm', supported is 'rms_norm'"):
        convert(tmp_path / "hf", tmp_path / "native")
