"""The order of the examples, the latent cache, and the embedded model's word tokenizer."""

from __future__ import annotations

import numpy as np
import pytest

from cogvideox_flax.errors import InputError
from cogvideox_flax.tokenizer import Tokenizer
from cogvideox_flax.training.latent_cache import prepare
from cogvideox_flax.training.shuffle import shuffled_indices
from weights.toy_world.make.vocabulary import word_model


def test_every_epoch_shows_every_example_once_in_a_new_order():
    seen = np.concatenate([shuffled_indices(step, batch=4, count=10, seed=1) for step in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert not np.array_equal(seen[:10], seen[10:])
    assert np.array_equal(shuffled_indices(3, batch=4, count=10, seed=1), seen[12:16])
    assert not np.array_equal(shuffled_indices(0, batch=10, count=10, seed=2), seen[:10])


def test_an_interrupted_latent_cache_is_completed(tmp_path):
    made = []

    def compute(indices):
        made.append(indices)
        if len(made) == 3:
            raise RuntimeError("power cut")
        return {"x": np.arange(indices.start, indices.stop, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)}

    with pytest.raises(RuntimeError):
        prepare(tmp_path, 10, compute, shard_size=3, meta={"vae": "a"})
    cache = prepare(tmp_path, 10, compute, shard_size=3, meta={"vae": "a"})
    assert [m.start for m in made] == [0, 3, 6, 6, 9]
    assert len(cache) == 10
    assert np.array_equal(cache.gather(np.array([9, 0, 4]))["x"][:, 0], [9, 0, 4])
    with pytest.raises(InputError, match="vae"):
        prepare(tmp_path, 10, compute, shard_size=3, meta={"vae": "b"})


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
