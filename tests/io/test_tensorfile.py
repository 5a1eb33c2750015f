"""Safetensors files as memory: what a CPU computes on without reading it first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import WEIGHTS_FILE, load_transformer, parameters, read_manifest
from cogvideox_flax.io.contents import content_hash
from cogvideox_flax.io.tensor_file import TensorFile, TensorWriter

ARRAYS = {
    "odd": np.arange(3, dtype=np.float32),
    "even": np.arange(64, dtype=np.float32).reshape(2, 32),
    "more": np.arange(32, dtype=np.int8).repeat(4),
    "none": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def path(tmp_path):
    with TensorWriter(tmp_path / "x.safetensors", {k: (x.shape, x.dtype) for k, x in ARRAYS.items()}, {}) as writer:
        for name, x in ARRAYS.items():
            writer.write(name, x)
    return tmp_path / "x.safetensors"


def test_whole_lines_are_mapped_whatever_odd_sizes_are_beside_them(path):
    with TensorFile(path) as file:
        for name in ("even", "more"):
            pages = file.mapped(name)
            assert pages is not None and pages.ctypes.data % 64 == 0
            np.testing.assert_array_equal(pages, ARRAYS[name])
        assert file.mapped("none") is None
        for name, x in ARRAYS.items():
            np.testing.assert_array_equal(file.read(name), x)


def test_what_is_not_aligned_is_not_mapped(path):
    header = int.from_bytes(path.read_bytes()[:8], "little")
    text = path.read_bytes()[8 : 8 + header] + b" "
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + header :])
    with TensorFile(path) as file:
        assert file.mapped("even") is None and file.mapped("more") is None
        np.testing.assert_array_equal(file.read("even"), ARRAYS["even"])


def test_pages_outlive_the_file_and_keep_changes_to_themselves(path):
    before = path.read_bytes()
    with TensorFile(path) as file:
        pages = file.mapped("even")
    pages[0] = -1
    assert path.read_bytes() == before
    path.unlink()
    np.testing.assert_array_equal(pages[1], ARRAYS["even"][1])


@pytest.mark.skipif(not hub.EMBEDDED.is_dir(), reason=f"no embedded checkpoint at {hub.EMBEDDED}")
def test_weights_given_away_leave_the_checkpoint_as_it_is():
    path = hub.EMBEDDED / "transformer" / WEIGHTS_FILE
    transformer = load_transformer(hub.EMBEDDED)
    before = {name: np.array(x) for name, x in parameters(transformer).items()}
    changed = jax.jit(lambda m: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), m), donate_argnums=0)(transformer)
    assert any((np.asarray(x) != before[name]).any() for name, x in parameters(changed).items())
    assert content_hash(path, cached=False) == read_manifest(hub.EMBEDDED).weights["transformer"]["sha256"]
    for name, x in parameters(load_transformer(hub.EMBEDDED)).items():
        np.testing.assert_array_equal(np.asarray(x), before[name])
