"""What a word costs and how far it moves the answer, of denoisers whose answers are known."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_flax import hub
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.schedulers.config import SchedulerConfig
from weights.toy_world.judge import caption_cost
from weights.toy_world.judge.word_shift import TIMESTEPS, shifts


class Believer:
    """Answers as if the clip were what the prompt says, as far as it believes it; else as if half of each."""

    def __init__(self, believes):
        self.scheduler = DDIMScheduler(SchedulerConfig())
        self._believes, self._seen = believes, []

    def latents(self, videos):
        self._seen.append(np.stack(videos).astype(np.float32)[:, ::4, ::8, ::8])
        return self._seen[-1]

    def velocity(self, latents, prompts, t):
        square, circle = self._seen
        says_square = np.array(["square" in prompt for prompt in prompts])[:, None, None, None, None]
        share = 0.5 + 0.5 * self._believes * np.where(says_square, 1, -1)
        x0, abar = share * square + (1 - share) * circle, float(self.scheduler.alphas_cumprod[t])
        noisy = self.scheduler.add_noise(latents, jnp.ones_like(latents), jnp.full(len(latents), t))
        return (np.sqrt(abar) * noisy - x0) / np.sqrt(1 - abar)


@pytest.mark.parametrize("believes", [1.0, 0.25, 0.0])
def test_a_word_moves_the_answer_as_far_as_it_is_believed(believes):
    found = shifts(Believer(believes), "square", "circle", 3)
    assert len(found) == len(TIMESTEPS)
    np.testing.assert_allclose(found, believes, atol=1e-3)


@pytest.mark.skipif(not hub.EMBEDDED.is_dir(), reason=f"no embedded checkpoint at {hub.EMBEDDED}")
def test_false_words_cost_the_embedded_model_something():
    clips = caption_cost.single_things(8)
    loss = caption_cost.make_loss(hub.EMBEDDED, clips)
    true, turned = loss(lambda thing: thing, 600), loss(caption_cost.turn, 600)
    moves = [clip.scene.things[0].motion != "still" for clip in clips]
    assert np.mean((turned - true)[moves]) > 0.02 and np.mean(true) < 0.1
    np.testing.assert_array_equal(turned[~np.array(moves)], true[~np.array(moves)])
