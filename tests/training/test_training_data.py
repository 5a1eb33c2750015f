"""The order of the examples, the latent cache, and the embedded model's word tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.tokenizer import Tokenizer
from cogvideox_flax.training.buckets import bucket_of, turn_of
from cogvideox_flax.training.clips import Clip
from cogvideox_flax.training.latent_cache import prepare
from cogvideox_flax.training.shuffle import shuffled_indices
from weights.toy_world.make.vocabulary import word_model


def test_every_epoch_shows_every_example_once_in_a_new_order():
    seen = np.concatenate([shuffled_indices(step, batch=4, count=10, seed=1) for step in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert not np.array_equal(seen[:10], seen[10:])
    assert np.array_equal(shuffled_indices(3, batch=4, count=10, seed=1), seen[12:16])
    assert not np.array_equal(shuffled_indices(0, batch=10, count=10, seed=2), seen[:10])


def test_a_clip_is_in_the_longest_bucket_that_it_fills_of_the_nearest_ratio():
    shapes = [(9, 32, 48), (9, 32, 32), (9, 64, 64), (17, 32, 48), (1, 64, 96)]
    sizes = [CogVideoX(RELEASES["cogvideox-2b"].configs).resolve_size(*shape) for shape in shapes]

    def chosen(num_frames, height, width):
        return shapes[bucket_of(Clip(Path("a"), "a", "", num_frames, height, width), sizes)]

    assert chosen(16, 200, 310) == (9, 32, 48)
    assert chosen(16, 200, 220) == (9, 64, 64), "the larger of one ratio"
    assert chosen(20, 200, 200) == (17, 32, 48), "the longest, whatever its ratio"
    assert chosen(1, 200, 200) == chosen(8, 200, 200) == (1, 64, 96)


def test_buckets_take_turns_by_the_number_of_their_clips():
    """A turn is a function of the step; with one bucket it is the step."""
    counts = [5, 2, 1]
    turns = [turn_of(step, counts, 3) for step in range(24)]
    for start in (0, 8, 16):
        of_round = [bucket for bucket, _ in turns[start : start + 8]]
        assert [of_round.count(bucket) for bucket in range(3)] == counts
    assert len({tuple(bucket for bucket, _ in turns[start : start + 8]) for start in (0, 8, 16)}) == 3
    for bucket in range(3):
        assert [turn for each, turn in turns if each == bucket] == list(range(3 * counts[bucket]))
    assert [turn_of(step, [7], 3) for step in range(20)] == [(0, step) for step in range(20)]


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
