"""Prompts to token ids for both text encoders: Qwen2's byte-level BPE, and the bytes of quoted text for ByT5.

Source: diffusers `HunyuanVideo15Pipeline`; transformers `Qwen2Tokenizer`, `ByT5Tokenizer`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Int32

from cogvideox_flax.config import Config
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.stand_ins import refuse_stand_in
from cogvideox_flax.io.values import load_json, short_repr
from cogvideox_flax.tokenizer import check_ids, check_prompts

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    *(f"tokenizer/{name}" for name in ("tokenizer.json", "vocab.json", "merges.txt")),
    *(f"tokenizer/{name}" for name in ("tokenizer_config.json", "added_tokens.json")),
    *(f"tokenizer_2/{name}" for name in ("tokenizer_config.json", "added_tokens.json")),
)
"""In a checkpoint of either layout, those that are there."""

_ASPECTS = (
    "The main content and theme of the video.",
    "The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "background environment, light, style and atmosphere.",
    "camera angles, movements, and transitions used in the video.",
)
SYSTEM_MESSAGE = "You are a helpful assistant. Describe the video by detailing the following aspects:" + "".join(
    f"{' ' * 9}{i}. {aspect}" for i, aspect in enumerate(_ASPECTS, 1)
)
"""What the model was trained with, letter by letter."""

PREFIX_LENGTH = 108
"""Tokens of the chat before the prompt, whose features are cut off."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen2 splits text before merging."""

PAD_TOKEN = "<|endoftext|>"

QUOTES = {'"': '"', "“": "”"}
"""Opening -> closing."""

BYTE_OFFSET, BYTE_EOS, BYTE_EXTRA = 3, 1, 125
"""Of ByT5: the id of byte 0, that of the end of a text, and how many extra ids follow the bytes."""


@dataclass(frozen=True, kw_only=True)
class TokenizersConfig(Config):
    """The number of features that the transformer gets of a prompt, and of its quoted text."""

    max_length: int = 1000
    glyph_length: int = 256

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """The lengths are the pipeline's, not the tokenizers' own limits."""
        return cls()


def chat(prompt: str) -> str:
    """Put a prompt into a conversation, as Qwen2.5's chat template writes it."""
    turns = {"system": SYSTEM_MESSAGE, "user": prompt or " "}
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns.items())
    return said + "<|im_start|>assistant\n"


def quoted_text(prompt: str) -> str | None:
    """The texts between straight or curly quotes, each once, as ByT5 was trained on them; None if there are none."""
    found = (text for line in prompt.split("\n") for text in _quotes(line))
    return "".join(f'Text "{text}". ' for text in dict.fromkeys(found)) or None


def _quotes(line: str) -> Iterator[str]:
    """The matches of `"(.*?)"|“(.*?)”`, in linear time: a regular expression looks for the end of every “ anew."""
    last, at = {opening: line.rfind(closing) for opening, closing in QUOTES.items()}, 0
    for found in re.finditer(f"[{''.join(QUOTES)}]", line):
        if at <= found.start() < last[found[0]]:
            end = line.index(QUOTES[found[0]], found.end())
            yield line[found.end() : end]
            at = end + 1


class Tokenizers:
    """Both tokenizers of a checkpoint.

    Args:
        folder: the checkpoint, with tokenizer/ and, where ByT5 has more tokens than bytes, tokenizer_2/.
        vocab_size, glyph_vocab_size: rows of the embeddings of Qwen2.5-VL and of ByT5.

    Raises:
        InputError: a file is missing or damaged.
    """

    def __init__(
        self, folder: str | Path, config: TokenizersConfig, *, vocab_size: int = 152064, glyph_vocab_size: int = 1510
    ):
        self.config, self._folder = config, Path(folder)
        self._vocab_size, self._glyph_vocab_size = vocab_size, glyph_vocab_size
        self._bpe = _load_bpe(Path(folder) / "tokenizer")
        self._pad = self._bpe.token_to_id(PAD_TOKEN)
        if self._pad is None:
            raise InputError(f"{Path(folder) / 'tokenizer'} has no token {PAD_TOKEN}; it is not Qwen2.5's tokenizer")
        special = {token: AddedToken(i, True, True) for i, token in enumerate(("<pad>", "</s>", "<unk>"))}
        special |= {f"<extra_id_{i}>": AddedToken(BYTE_OFFSET + 256 + i) for i in range(BYTE_EXTRA)}
        special |= _added_tokens(Path(folder) / "tokenizer_2")
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def prompts(self, prompts: Sequence[str]) -> dict[str, Int32[np.ndarray, "B L"]]:
        """`ids` and `mask` of prompts within their chat, padded on the right; a warning says what is cut.

        Raises:
            InputError: not a list of strings, a string that is not valid Unicode, or a token that the text encoder
                does not have.
        """
        length = PREFIX_LENGTH + self.config.max_length
        rows = []
        for prompt in check_prompts(prompts):
            ids = self._bpe.encode(chat(prompt), add_special_tokens=False).ids
            if cut := ids[length:]:
                end = self._bpe.decode(cut, skip_special_tokens=True).removesuffix("\nassistant\n")
                message = "the prompt, with the end of its chat, has %d tokens more than the model's %d and is cut: %s"
                log.warning(message, len(cut), self.config.max_length, short_repr(end, 200))
            check_ids(ids[:length], self._vocab_size, self._folder / "tokenizer")
            rows.append(ids[:length])
        return _padded(rows, length, self._pad)

    def glyphs(self, prompts: Sequence[str]) -> dict[str, Int32[np.ndarray, "B L"]]:
        """`ids` and `mask` of the quoted text of prompts, padded on the right; without any, the mask is 0.

        Errors as for `prompts`.
        """
        length, rows = self.config.glyph_length, []
        for prompt in check_prompts(prompts):
            text = quoted_text(prompt)
            ids = [] if text is None else self._bytes(text)
            if len(ids) > length - 1:
                log.warning("the quoted text has %d bytes; the last %d are cut", len(ids), len(ids) - length + 1)
            check_ids(ids[: length - 1], self._glyph_vocab_size, self._folder / "tokenizer_2")
            rows.append([*ids[: length - 1], BYTE_EOS] if text is not None else [])
        return _padded(rows, length, 0)

    def _bytes(self, text: str) -> list[int]:
        parts = self._split.split(text)  # text, token, text, ..., text
        for i in range(1, len(parts), 2):
            # not in the expression: one that begins with white space looks at every run of it again and again
            if self._special[parts[i]].lstrip:
                parts[i - 1] = parts[i - 1].rstrip()
            if self._special[parts[i]].rstrip:
                parts[i + 1] = parts[i + 1].lstrip()
        ids: list[int] = []
        for i, part in enumerate(parts):
            ids += [self._special[part].id] if i % 2 else [BYTE_OFFSET + byte for byte in part.encode()]
        return ids


class AddedToken(NamedTuple):
    """A token beside the vocabulary: its id, and whether it takes the white space before and after it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


def _padded(rows: Sequence[Sequence[int]], length: int, pad: int) -> dict[str, Int32[np.ndarray, "B L"]]:
    ids, mask = (np.full((len(rows), length), value, np.int32) for value in (pad, 0))
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"ids": ids, "mask": mask}


def _load_bpe(folder: Path) -> Any:
    """Qwen2's tokenizer from tokenizer.json, or from vocab.json and merges.txt."""
    from tokenizers import Tokenizer

    whole = folder / "tokenizer.json"
    for path in (whole, folder / "vocab.json", folder / "merges.txt"):
        if path.is_file():
            refuse_stand_in(path)
    try:
        bpe = Tokenizer.from_file(str(whole)) if whole.is_file() else _make_bpe(folder)
    except InputError:
        raise
    except Exception as e:  # the library raises no other type
        raise InputError(f"cannot read the tokenizer in {folder}: {e}; download it again") from e
    bpe.no_padding()
    bpe.no_truncation()
    return bpe


def _make_bpe(folder: Path) -> Any:
    import tokenizers
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if missing := [path.name for path in (vocab, merges) if not path.is_file()]:
        raise InputError(f"{folder} has neither tokenizer.json nor {' and '.join(missing)}; download them again")
    bpe = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    bpe.decoder = decoders.ByteLevel()
    added = sorted(_added_tokens(folder).items(), key=lambda pair: pair[1].id)
    bpe.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token, _ in added])
    if wrong := [token for token, each in added if bpe.token_to_id(token) != each.id]:
        raise InputError(f"{folder}: {', '.join(wrong[:3])} do not follow the vocabulary; download the tokenizer again")
    return bpe


def _added_tokens(folder: Path) -> dict[str, AddedToken]:
    """Tokens beside the vocabulary; none without the files that say so."""
    found: dict[str, AddedToken] = {}
    config, added = folder / "tokenizer_config.json", folder / "added_tokens.json"
    try:
        if added.is_file():
            found |= {str(token): AddedToken(int(i)) for token, i in load_json(added).items()}
        if config.is_file():
            entries: Mapping[str, Any] = load_json(config).get("added_tokens_decoder") or {}
            found |= {
                str(entry["content"]): AddedToken(int(i), bool(entry.get("lstrip")), bool(entry.get("rstrip")))
                for i, entry in entries.items()
            }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise InputError(f"cannot read the tokens in {folder}: {e}; download the tokenizer again") from e
    return {token: each for token, each in found.items() if token}
