"""JAX's settings, which a program or its environment may have changed, change no result."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.runtime.compile import CompiledProgram, Program
from cogvideox_flax.runtime.settings import own_settings, random_key
from cogvideox_flax.training.config import read_config
from cogvideox_flax.training.finetune import finetune
from cogvideox_flax.training.job import check
from tests.support.media import make_clips

PROMPT = "a large yellow circle goes up against a black background"
SMALL: Any = {"num_frames": 9, "height": 32, "width": 32, "num_inference_steps": 2, "force": True, "progress": False}

DECISIVE = {
    "jax_allow_f16_reductions": False,
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_prng_impl": "rbg",
    "jax_disable_jit": True,
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_random_seed_offset": 5,
    "jax_softmax_custom_jvp": True,
    "jax_threefry_partitionable": False,
    "jax_transfer_guard": "disallow",
}
"""Settings that would change a result, or end in an error of JAX's, and a value of each that is not the default."""

HARMLESS = {
    "check_vma": True,
    "jax_array_garbage_collection_guard": "fatal",
    "jax_auto_pcast": False,
    "jax_check_static_indices": True,
    "jax_check_tracer_leaks": True,
    "jax_debug_infs": True,
    "jax_debug_key_reuse": True,
    "jax_debug_nans": True,
    "jax_enable_checks": True,
    "jax_enable_custom_prng": True,
    "jax_explicit_x64_dtypes": "error",
    "jax_high_dynamic_range_gumbel": True,
    "jax_legacy_prng_key": "error",
    "jax_log_compiles": True,
    "jax_mutable_array_checks": False,
    "jax_pallas_enable_debug_checks": True,
    "jax_refs_to_pins": True,
    "jax_remove_size_one_mesh_axis_from_type": True,
    "jax_thread_guard": True,
    "jax_threefry_gpu_kernel_lowering": True,
    "jax_use_direct_linearize": False,
    "jax_use_shardy_partitioner": False,
    "jax_use_simplified_jaxpr_constants": True,
}

CONTEXTS = (
    lambda: jax.default_matmul_precision("bfloat16"),
    lambda: jax.default_prng_impl("rbg"),
    lambda: jax.disable_jit(),
    lambda: jax.enable_x64(True),
    lambda: jax.numpy_rank_promotion("raise"),
    lambda: jax.threefry_partitionable(False),
    lambda: jax.transfer_guard("disallow"),
)


@contextmanager
def settings(values):
    """JAX's settings, for the whole process, as environment variables set them."""
    before = {name: jax.config.values[name] for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        jax.clear_caches()  # not all settings are among the keys of what JAX has traced
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.clear_caches()


def video(model, **options):
    """The frames, with an adapter for the model that there is one for."""
    pipe = Pipeline.from_pretrained(model, dtype="float32")
    if model == "embedded":
        pipe.load_lora("embedded-four-steps")
    return pipe(PROMPT, scheduler="dpm", **SMALL | options).frames


@cache
def usual(model):
    return video(model, **inputs(model))


def inputs(model):
    """An image, and latents alone: the decoder is that of the other model."""
    image = np.linspace(0, 255, 32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8)
    return {"image": image, "output_type": "latent"} if model == "embedded-image-to-video" else {}


@pytest.mark.parametrize("model", ["embedded-image-to-video", pytest.param("embedded", marks=pytest.mark.further)])
def test_no_setting_of_the_process_changes_a_video(model):
    expected = usual(model)
    with settings(DECISIVE):
        np.testing.assert_array_equal(video(model, **inputs(model)), expected)


def test_no_context_changes_a_video():
    expected = usual("embedded")
    with ExitStack() as contexts:
        for context in CONTEXTS:
            contexts.enter_context(context())
        np.testing.assert_array_equal(video("embedded"), expected)


def test_another_default_device_changes_no_video():
    with settings({"jax_default_device": jax.devices()[1]}):
        np.testing.assert_array_equal(video("embedded"), usual("embedded"))


@pytest.mark.further
@pytest.mark.parametrize(("name", "value"), (DECISIVE | HARMLESS).items())
def test_no_setting_alone_changes_a_video(name, value):
    expected = usual("embedded")
    if name not in jax.config.values:
        pytest.skip("this version of JAX has no such setting")
    with settings({name: value}):
        np.testing.assert_array_equal(video("embedded"), expected)


def test_stages_of_ones_own_and_decoding_in_chunks():
    request = GenerationRequest(PROMPT, num_frames=9, height=32, width=32, num_inference_steps=2, force=True)

    def frames():
        pipe = Pipeline.from_pretrained("embedded", dtype="float32")
        conditioning = pipe.encode(request, progress=False)
        *_, state = pipe.denoise(conditioning, request)
        (clip,) = pipe.decode(state.latents, in_chunks=True, progress=False)
        return np.stack(list(clip))

    expected = frames()
    with settings(DECISIVE):
        np.testing.assert_array_equal(frames(), expected)


CONFIG = """
model = "embedded"
clips = "{folder}/clips"
out = "{folder}/{out}"
method = "lora"
num_frames = 9
height = 32
width = 48
batch = 2
caption_dropout = 0.3
lora = {{ rank = 2, targets = ["q"] }}
loop = {{ steps = 2, dtype = "bfloat16" }}
"""


@pytest.mark.further
def test_no_setting_changes_what_is_trained(tmp_path):
    make_clips(tmp_path / "clips")

    def train(out):
        path = tmp_path / "config.toml"
        path.write_text(CONFIG.format(folder=tmp_path, out=out))
        return load_file(finetune(check(read_config(path)), progress=False))

    expected = train("usual")
    with settings(DECISIVE):
        changed = train("changed")
    assert changed.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(changed[name], value)


class Product(Program):
    """A product that does not name a precision."""

    name = "product"

    def __call__(self, x):
        return x @ x


def test_a_program_has_the_librarys_precision():
    x = jnp.ones((4, 4))
    expected = CompiledProgram(Product()).prepare(x).as_text()
    for change in (settings({"jax_default_matmul_precision": "highest"}), jax.default_matmul_precision("highest")):
        with change:
            assert CompiledProgram(Product()).prepare(x).as_text() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_the_key_of_a_seed_is_that_of_jax(seed):
    expected = jax.random.normal(jax.random.key(np.uint32(seed)), (3,))
    np.testing.assert_array_equal(jax.random.normal(random_key(seed), (3,)), expected)
    np.testing.assert_array_equal(jax.random.normal(jax.jit(random_key)(np.uint32(seed)), (3,)), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eager_constant_folding", True),
        ("jax_error_checking_behavior_nan", "raise"),
        ("jax_scan3", True),
    ],
)
def test_what_cannot_be_undone_is_refused(name, value):
    pipe = Pipeline.from_pretrained("embedded", dtype="float32")
    with settings({name: value}), pytest.raises(InputError, match=f"JAX's setting {name} is {value!r}") as refusal:
        pipe(PROMPT, **SMALL)
    assert "\n" not in str(refusal.value)


def test_a_program_keeps_its_settings():
    with settings(DECISIVE), jax.disable_jit(False):
        with own_settings():
            assert jnp.arange(3).dtype == jnp.int32
        assert jnp.arange(3).dtype == jnp.int64
