"""Prompts to token ids, with the released SentencePiece model or what transformers 5 saves in its place.

Source: the released `T5Tokenizer` (transformers), a unigram SentencePiece model (arXiv 1808.06226) with pad 0, end of
sequence 1, unknown 2 and 100 sentinels after the last piece.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import sentencepiece
from jaxtyping import Int32

from cogvideox_flax.config import Config
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import open_file
from cogvideox_flax.io.stand_ins import refuse_stand_in
from cogvideox_flax.io.values import short_repr

log = logging.getLogger(__name__)

SPIECE_FILE = "tokenizer/spiece.model"
"""In a checkpoint of either layout."""

JSON_FILE = "tokenizer/tokenizer.json"
"""What transformers 5 saves in its place."""

PAD, EOS, UNKNOWN = 0, 1, 2
MAX_SENTINELS = 100
_NORMALIZER_FIELD = 3  # of SentencePiece's ModelProto, written after all pieces


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """The length of tokenized prompts: `max_length` ids, end of sequence included (`tokenizer_config.json`)."""

    max_length: int = 226

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], max_length: int | None = None) -> Self:
        """max_length: the transformer's `max_text_seq_length`, which wins over the tokenizer's own limit."""
        return cls(max_length=max_length or int(raw.get("model_max_length", 226)))


def check_prompts(prompts: Sequence[str]) -> Sequence[str]:
    """Check that prompts are texts that can be encoded.

    Raises:
        InputError: not a list of strings, or a string that is not valid Unicode.
    """
    if isinstance(prompts, str):
        raise InputError("the tokenizer takes a list of prompts, got one string; write [prompt]")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise InputError(f"a prompt must be a string; got {prompt!r} ({type(prompt).__name__})")
        try:
            prompt.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the prompt {prompt!r} is not valid Unicode at character {e.start}; retype it") from e
    return prompts


def check_ids(ids: Sequence[int], vocab_size: int, folder: Path) -> None:
    """Refuse token ids without a row in the text encoder's embedding, which a compiled program would not report.

    Args:
        vocab_size: rows of the embedding.
        folder: the tokenizer's, for the message.
    """
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        raise InputError(
            f"the tokenizer in {folder} makes token {wrong[0]} of the prompt, and the text encoder has tokens 0 to "
            f"{vocab_size - 1}; copy both from the same checkpoint"
        )


class _SentencePiece:
    """The ids of a text by SentencePiece itself; special tokens are cut out before."""

    def __init__(self, path: Path, vocab_size: int):
        self._model = _load(path)
        extra_ids = max(0, min(MAX_SENTINELS, vocab_size - len(self._model)))
        last = len(self._model) + extra_ids - 1
        self._special = {"<pad>": PAD, "</s>": EOS, "<unk>": UNKNOWN}
        self._special |= {f"<extra_id_{i}>": last - i for i in range(extra_ids)}
        self._names = {i: token for token, i in self._special.items()}
        self._split = re.compile(f"({'|'.join(map(re.escape, self._special))})")

    def encode(self, prompt: str) -> list[int]:
        ids: list[int] = []
        for part in self._split.split(prompt):
            ids += [self._special[part]] if part in self._special else self._model.EncodeAsIds(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        pieces = [self._names.get(i) or self._model.IdToPiece(i) for i in ids]
        return "".join(pieces).replace("▁", " ").strip()


class _TokenizerJson:
    """The ids of a text by the tokenizers library, which has the special tokens in its file."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        refuse_stand_in(path)
        try:
            self._model = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises no other type
            raise InputError(f"cannot read the tokenizer {path}: {e}; download it again") from e
        self._model.no_padding()
        self._model.no_truncation()
        _check_special(path, *map(self._model.token_to_id, ("<pad>", "</s>", "<unk>")))

    def encode(self, prompt: str) -> list[int]:
        return list(self._model.encode(prompt, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids, skip_special_tokens=False))


class Tokenizer:
    """A list of prompts to ids, int32 [B, max_length].

    As released: no cleaning and no lower-casing; runs of white space count as one space; end of sequence closes each
    prompt, the rest is padded with 0. `</s>`, `<pad>`, `<unk>` and `<extra_id_0>` to `<extra_id_99>` typed in a prompt
    become those tokens, and the text on either side is encoded by itself.

    transformers 5 re-implements SentencePiece. Where the two differ, this is SentencePiece itself, as the released
    tokenizer was: among equally likely splits of a run such as "AAAAA", and for the control character U+0085. With the
    tokenizer.json that transformers 5 saves, ids are those of transformers 5.

    Args:
        spiece_model_path: the file `tokenizer/spiece.model`, or `tokenizer/tokenizer.json`.
        max_length: ids per prompt, end of sequence included.
        vocab_size: rows of the text encoder's embedding; what the pieces leave over holds up to 100 sentinels.

    Raises:
        InputError: the file is missing, damaged, or not a T5 tokenizer.
    """

    def __init__(self, spiece_model_path: str | Path, max_length: int = 226, *, vocab_size: int = 32128):
        self.max_length = max_length
        path = Path(spiece_model_path)
        self._vocab_size, self._folder = vocab_size, path.parent
        self._text = _TokenizerJson(path) if path.suffix == ".json" else _SentencePiece(path, vocab_size)

    def __call__(self, prompts: Sequence[str]) -> Int32[np.ndarray, "B L"]:
        """Encode prompts; a prompt that is too long is cut before its end of sequence, and a warning names the rest.

        Raises:
            InputError: not a list of strings, a string that is not valid Unicode, or a token that the text encoder
                does not have.
        """
        ids = np.full((len(prompts), self.max_length), PAD, np.int32)
        for row, prompt in zip(ids, check_prompts(prompts), strict=True):
            tokens = self._text.encode(prompt)
            kept, cut = tokens[: self.max_length - 1], tokens[self.max_length - 1 :]
            if cut:
                log.warning(
                    "the prompt has %d tokens and the model reads %d; the last %d are cut: %s",
                    len(tokens),
                    self.max_length - 1,
                    len(cut),
                    short_repr(self._text.decode(cut), 200),
                )
            check_ids(kept, self._vocab_size, self._folder)
            row[: len(kept) + 1] = [*kept, EOS]
        return ids


def _load(path: Path) -> sentencepiece.SentencePieceProcessor:
    try:
        with open_file(path) as file:
            raw = file.read()
    except OSError as e:
        raise InputError(
            f"cannot read the tokenizer {path}: {e.strerror}. It is tokenizer/spiece.model, or the tokenizer.json that "
            "transformers 5 saves in its place; all releases share it: copy it from any released checkpoint"
        ) from e
    refuse_stand_in(path)
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(raw)
        complete = _NORMALIZER_FIELD in _top_level_fields(raw)
    except (RuntimeError, IndexError):
        complete = False
    if not complete:
        raise InputError(f"{path} ({len(raw):,} bytes) is not a whole SentencePiece model; download it again")
    _check_special(path, model.pad_id(), model.eos_id(), model.unk_id())
    return model


def _check_special(path: Path, *ids: int | None) -> None:
    if ids != (PAD, EOS, UNKNOWN):
        raise InputError(
            f"{path} has pad, end of sequence, unknown at {ids}; expected {PAD, EOS, UNKNOWN} as in a T5 tokenizer"
        )


def _top_level_fields(raw: bytes) -> set[int]:
    """The field numbers of a protobuf message whose fields all carry a length.

    A file cut between two pieces still parses; only the lack of what follows the pieces gives it away.
    """
    fields, at = set(), 0
    while at < len(raw):
        fields.add(raw[at] >> 3)
        length, shift = 0, 0
        while True:
            at += 1
            length |= (raw[at] & 127) << shift
            shift += 7
            if raw[at] < 128:
                break
        at += 1 + length
    return fields
