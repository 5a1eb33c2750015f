"""docs/architecture.md: every shape in it is the code's, and every name is where its link leads."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.generate.journey import make_videos
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.models.chunks import chunk_sizes
from cogvideox_flax.models.cogvideox.autoencoder import DECODE_CHUNK
from cogvideox_flax.models.cogvideox.transformer import patchify
from cogvideox_flax.models.registry import RELEASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def shapes_in(page: str) -> list[tuple[int, ...]]:
    """The shapes of the tables of a part of the page, in its order."""
    rows = re.findall(r"^\| [^|]+ \| \[([\d, ]+)\] \|", page, flags=re.M)
    return [tuple(map(int, row.split(","))) for row in rows]


class Run:
    """The arrays of a release's default run, as shapes."""

    def __init__(self, release: str):
        manifest = Manifest.of_release(RELEASES[release])
        self.run = run = resolve(GenerationRequest("a panda"), manifest, "bfloat16")
        self.config = manifest.configs[run.model.denoiser]
        self.texts = [(args[1], jax.eval_shape(program, *args)) for program, args, _ in run.abstract("encode")]
        ((step, (self.transformer, inputs, self.state), self.steps),) = run.abstract("denoise")
        next_state, _ = jax.eval_shape(step, self.transformer, inputs, self.state)
        self.tables, self.next_latents = inputs.steps, next_state.latents.shape
        self.batch = jax.eval_shape(run.guidance.batch, self.state.latents)
        features, t = jax.eval_shape(run.guidance.features, inputs.conditioning), run.steps.timesteps.dtype
        given = self.transformer, self.batch, features, jax.ShapeDtypeStruct((), t)
        self.tokens = jax.eval_shape(lambda *args: run.model.embed(*args, next_timestep=args[-1]), *given)
        predict = jax.eval_shape(
            lambda model, tokens: model.head(model.run_blocks(tokens)), self.transformer, self.tokens
        )
        self.prediction = predict.shape
        ((decode, args, _),) = run.abstract("decode")
        self.decoder, self.frames = args[0], jax.eval_shape(decode, *args)[0].shape

    def chunk(self, frames: int, cache=None):
        """The decoder's input of so many latent frames, its video, and the cache."""
        batch, _, *rest = self.state.latents.shape
        z = jax.ShapeDtypeStruct((batch, frames, *rest), jnp.bfloat16)
        video, cache = jax.eval_shape(lambda vae, z, cache: vae.decode_chunk(z, cache), self.decoder, z, cache)
        return z.shape, video.shape, cache


def test_the_journey_is_as_in_the_code():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert textwrap.indent(block, "    ") in inspect.getsource(make_videos) and block.count("\n") >= 20


def test_the_shapes_of_cogvideox_5b():
    own = Run("cogvideox-5b")
    ((ids, text),) = own.texts
    x = own.tokens.x.shape
    first, later = chunk_sizes(own.state.latents.shape[1], DECODE_CHUNK)[:2]
    first_z, first_video, cache = own.chunk(first)
    later_z, later_video, _ = own.chunk(later, cache)
    expected = [
        ids.shape,
        text["prompt_embeds"].shape,
        own.state.latents.shape,
        own.tables.timesteps.shape,
        own.batch.shape,
        jax.eval_shape(lambda latents: patchify(latents, own.config), own.batch).shape,
        x,
        own.tokens.emb.shape,
        own.tokens.rotary[0].shape,
        (*x[:2], own.config.heads, own.config.head_dim),
        own.prediction,
        own.next_latents,
        first_z,
        first_video,
        later_z,
        later_video,
        own.frames,
    ]
    assert own.steps == 50 and len(own.transformer.blocks.norm1.linear.kernel) == 42
    assert chunk_sizes(13, DECODE_CHUNK) == [3, 2, 2, 2, 2, 2]
    assert shapes_in(PAGE.read_text().partition("## CogVideoX-5b")[2].partition("\n## ")[0]) == expected


def test_the_shapes_of_hunyuan_video_15():
    own = Run("hunyuanvideo1.5-480p-t2v")
    (qwen, text), (byt5, glyphs) = own.texts
    video, words = own.tokens.x
    expected = [
        qwen["ids"].shape,
        text["prompt_embeds"].shape,
        byt5["ids"].shape,
        glyphs["prompt_embeds_2"].shape,
        own.state.latents.shape,
        own.batch.shape,
        video.shape,
        words.shape,
        own.tokens.emb.shape,
        own.tokens.rotary[0].shape,
        (*video.shape[:2], own.config.heads, own.config.head_dim),
        own.prediction,
        own.next_latents,
        own.frames,
    ]
    assert shapes_in(PAGE.read_text().partition("## HunyuanVideo-1.5")[2].partition("\n## ")[0]) == expected


LINK = re.compile(r"\[((?:`[\w.]+`(?:, )?)+)\]\((\.\./[\w./]+\.py)\)")


@pytest.mark.parametrize(("names", "path"), sorted(set(LINK.findall(PAGE.read_text()))))
def test_a_name_is_where_its_link_leads(names, path):
    source = (PAGE.parent / path).read_text()
    for name in re.findall(r"`([\w.]+)`", names):
        last = name.rpartition(".")[2]
        found = re.search(rf"^ *(?:def|class) {last}\b|^{last}\b.* = ", source, flags=re.M)
        assert found or Path(path).stem == last, f"{name} is not in {path}"


def test_the_page_is_one_click_from_the_readme():
    assert "(docs/architecture.md)" in (PAGE.parents[1] / "README.md").read_text()
