"""The domain of a small model, recorded in its checkpoint, and warnings of runs outside of it.

Released models know of everything; the embedded ones know a few words, a few colours and one size.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from jaxtyping import UInt8

from cogvideox_flax.io.values import expected_of, short_repr, typed
from cogvideox_flax.models.sizes import Size

NEAR_COLOUR = 90.0
"""The greatest distance in RGB at which a pixel counts as one of the model's colours: pure blue counts as its blue."""
MIN_SHARE = 0.9
"""The minimum share of an image's pixels that are near one of the colours, and of those like their right neighbour.
Of the embedded models' own world both are 0.95 and above; of photographs, one at least is below 0.88."""


ALSO_STATED = {"colour": ("white", "black", "gray")}
"""Words that the models know as those of backgrounds, and that state a colour where no background follows."""
LEFT_OPEN = ("motion",)
"""What a prompt may leave to the model: "a red circle" is one in 96 % of the videos (weights/embedded/README.md)."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The training domain of a model.

    subject: what its videos show, such as "simple shapes in motion".
    words: all that its prompts were made of, in lower case.
    stated: what every prompt stated, such as "motion" -> the words for it.
    prompts: some that work.
    colours: RGB, 0 to 255, of which its images consist.
    num_frames, height, width: the size at which it was trained; at others it gives no usable video.
    """

    subject: str
    words: tuple[str, ...]
    stated: Mapping[str, tuple[str, ...]]
    prompts: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]
    num_frames: int
    height: int
    width: int

    @classmethod
    def from_json(cls, raw: Any) -> Domain:
        """The inverse of `dataclasses.asdict`.

        Raises:
            ValueError: it is damaged.
        """
        hints = typing.get_type_hints(cls)
        if not isinstance(raw, dict) or raw.keys() != hints.keys():
            raise ValueError(f"domain is {short_repr(raw)}; expected {', '.join(hints)}")
        stated = raw["stated"]
        if not isinstance(stated, dict):
            raise ValueError(f"the domain's stated is {short_repr(stated)}; expected lists of words")
        values: dict[str, Any] = {"stated": {name: typed(tuple[str, ...], words) for name, words in stated.items()}}
        for name, kind in hints.items():
            if name in values:
                continue
            try:
                values[name] = typed(kind, raw[name])
            except ValueError:
                raise ValueError(
                    f"the domain's {name} is {short_repr(raw[name])}; expected {expected_of(kind)}"
                ) from None
        return cls(**values)

    @property
    def summary(self) -> str:
        """The end of every `prompt_warning`."""
        return f"; the model shows {self.subject}. Prompts that work: {'; '.join(self.prompts)}"

    def prompt_warning(self, prompt: str, shown: bool = False) -> str | None:
        """Say what of a prompt is outside of the domain; None if nothing is.

        shown: an image or clip shows what the prompt leaves out.
        """
        words = list(dict.fromkeys(_words(prompt)))
        if not words:
            return None
        if unknown := [word for word in words if word not in self.words]:
            found = ", ".join(f"{word!r}{self._hint(word)}" for word in unknown)
            said = f"the model does not know {'the word ' if len(unknown) == 1 else ''}{found}"
        elif not shown and set(missing := self._not_stated(prompt)) - {*LEFT_OPEN}:
            found = " and no ".join(f"{name} ({', '.join(self.stated[name][:5])}, ...)" for name in missing)
            said = f"the prompt {short_repr(prompt)} says no {found}"
        else:
            return None
        return said + self.summary

    def _not_stated(self, prompt: str) -> list[str]:
        words = _words(prompt)
        stated = {word for word, following in zip(words, [*words[1:], ""], strict=True) if following != "background"}
        return [name for name, known in self.stated.items() if not stated & {*known, *ALSO_STATED.get(name, ())}]

    def _hint(self, word: str) -> str:
        near = get_close_matches(word, self.words, 1, 0.8)
        return f" (did you mean {near[0]!r}?)" if near else ""

    def image_warning(self, name: str, image: UInt8[np.ndarray, "H W 3"]) -> str | None:
        """Say that an image is unlike all of the domain; None if it is not."""
        pixels = image.astype(np.float32)
        distances = [np.square(pixels - colour).sum(-1) for colour in self.colours]
        near = (np.min(distances, 0) <= NEAR_COLOUR**2).mean()
        flat = (np.abs(np.diff(pixels, axis=1)).max(-1) <= 8).mean()
        if min(near, flat) >= MIN_SHARE:
            return None
        return f"{name} is like no image of the model's training: it shows {self.subject}, in a few flat colours"

    def size_warning(self, size: Size) -> str | None:
        """Say that a size gives no usable video, and which one does; None if it does."""
        if (size.num_frames, size.height, size.width) == (self.num_frames, self.height, self.width):
            return None
        is_longer = size.num_frames > self.num_frames and (size.height, size.width) == (self.height, self.width)
        return (
            f"the model gives no usable video of {size.num_frames} frames at {size.height}x{size.width}; it knows "
            f"{self.num_frames} frames at {self.height}x{self.width}"
            + (f", and longer clips in windows of {self.num_frames} (--window {self.num_frames})" if is_longer else "")
        )


def _words(prompt: str) -> list[str]:
    """The words of a prompt in lower case, without punctuation."""
    return re.findall(r"[^\s.,;:!?\"()]+", prompt.lower())
