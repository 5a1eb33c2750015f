"""A SentencePiece model built from a list of words: one piece per word, letters for all other words.

Training SentencePiece on such a small vocabulary would split words into fragments.
"""

from __future__ import annotations

import io
import string
import tempfile
from collections.abc import Iterable
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

pb: Any = sentencepiece_model_pb2  # generated at import, without types

SPACE = "▁"
_LETTERS = string.ascii_lowercase + "'-"
_RARE = -20.0
"""Log probability of a letter: any split into letters is less likely than a word."""


def word_model(words: Iterable[str]) -> bytes:
    """A T5-style unigram model (pad 0, end of sequence 1, unknown 2) with one token per word, upper case folded.

    Args:
        words: lower-case words.

    Returns:
        The bytes of a `spiece.model`.
    """
    model = _template()
    del model.pieces[:]
    kinds = pb.ModelProto.SentencePiece
    for piece, score, kind in (
        ("<pad>", 0.0, kinds.CONTROL),
        ("</s>", 0.0, kinds.CONTROL),
        ("<unk>", 0.0, kinds.UNKNOWN),
    ):
        model.pieces.add(piece=piece, score=score, type=kind)
    for word in sorted(set(words)):
        model.pieces.add(piece=SPACE + word, score=-1.0)
    for letter in (SPACE, *_LETTERS):
        model.pieces.add(piece=letter, score=_RARE)
    model.trainer_spec.vocab_size = len(model.pieces)
    return model.SerializeToString(deterministic=True)


def _template() -> Any:
    """A model that folds A-Z to a-z, reads punctuation as space and has T5's special ids; its pieces do not matter."""
    rules = [(ord(upper), ord(upper.lower())) for upper in map(str.upper, string.ascii_lowercase)]
    rules += [(ord(mark), ord(" ")) for mark in ".,;:!?"]
    written = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.write("".join(f"{source:x}\t{target:x}\n" for source, target in rules))
        file.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(_LETTERS)]),
            model_writer=written,
            model_type="char",
            vocab_size=len(_LETTERS) + 4,
            hard_vocab_limit=False,
            normalization_rule_tsv=file.name,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    model = pb.ModelProto.FromString(written.getvalue())
    model.trainer_spec.model_type = pb.TrainerSpec.UNIGRAM
    model.normalizer_spec.ClearField("normalization_rule_tsv")  # the path of a file that no longer exists
    return model
