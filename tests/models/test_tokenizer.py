"""The tokenizer against transformers' T5Tokenizer, on the released SentencePiece model and on a small one made here."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from transformers import T5Tokenizer

from cogvideox_flax.errors import InputError
from cogvideox_flax.tokenizer import Tokenizer
from tests.support.reference import SHARED

PROMPTS = SHARED / "data" / "prompts"
RELEASED = SHARED / "data" / "tokenizer"

needs_released = pytest.mark.skipif(
    not (RELEASED / "spiece.model").is_file(), reason=f"the released tokenizer is not at {RELEASED}"
)

ODD_PROMPTS = (
    "",
    " ",
    "  a  cat   runs  ",
    "one\ntwo\tthree\r\n\nfour",
    "no\u00a0break\u3000wide\u2028line",
    "café cafe\u0301 Ünïcödé ﬁne ½ ① ＡＢＣ",
    "😀 a 🚗🎥 man 👩‍👩‍👧",
    "日本語 привет العربية",
    "\u200bzero\u200bwidth \ufeffbom soft\u00adhyphen",
    "▁a▁b",
    "‘quote’ “x” — … 1,000.50% {}[]\\|~`^ \x7f\x00",
    "CAPITALS and lower",
    "a</s>b",
    "a </s> b",
    "</s>",
    "a </s>",
    "x <pad> y",
    "<unk>",
    "a <extra_id_0> b",
    "a<extra_id_99>b <extra_id_10><extra_id_1>",
    "<extra_id_100> <extra_id_> <s> </S>",
    "a b " * 300,
    "word " * 224,
    "word " * 225,
    "word " * 226,
)


def train(path: Path, **settings) -> None:
    """A unigram SentencePiece model whose pieces are letters and these words."""
    words = ["a", "small", "red", "circle", "moves", "left", "the", "blue", "square", "stays"]
    rng = np.random.default_rng(0)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(rng.permutation(words)) for _ in range(200)]),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    path.write_bytes(model.getvalue())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A directory with a small T5-like model."""
    folder = tmp_path_factory.mktemp("small")
    train(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return folder


def reference_ids(folder: Path, prompts: list[str], max_length: int = 226) -> np.ndarray:
    tokenizer = T5Tokenizer.from_pretrained(folder)
    out = tokenizer(prompts, padding="max_length", max_length=max_length, truncation=True, add_special_tokens=True)
    return np.array(out["input_ids"])


def assert_same(folder: Path, prompts: list[str], **kwargs):
    ours = Tokenizer(folder / "spiece.model", **kwargs)(prompts)
    theirs = reference_ids(folder, prompts, **kwargs)
    assert ours.dtype == np.int32
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=repr(prompt))


@needs_released
def test_known_ids():
    ids = Tokenizer(RELEASED / "spiece.model")(["translate English to German: The house is wonderful."])
    assert ids.shape == (1, 226)
    assert ids[0, :11].tolist() == [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, 1]
    assert not ids[0, 11:].any()


@needs_released
@pytest.mark.parametrize("name", ["cogvideo.txt", "vbench.txt", "vbench_long_sample.txt"])
def test_real_prompts_equal_reference(name):
    assert_same(RELEASED, (PROMPTS / name).read_text().splitlines())


@needs_released
def test_real_prompts_cut_short_equal_reference():
    """No real prompt reaches 226 tokens, so cut them at 60."""
    prompts = (PROMPTS / "vbench_long_sample.txt").read_text().splitlines()
    assert_same(RELEASED, prompts, max_length=60)


@needs_released
def test_odd_prompts_equal_reference():
    assert_same(RELEASED, list(ODD_PROMPTS))


@needs_released
def test_where_transformers_5_is_not_sentencepiece():
    """The two documented differences; in both, ours is what the original SentencePiece library says."""
    original = sentencepiece.SentencePieceProcessor(model_file=str(RELEASED / "spiece.model"))
    prompts = ["A" * 30, "a\x85b"]
    ours = Tokenizer(RELEASED / "spiece.model")(prompts)
    for row, other, prompt in zip(ours, reference_ids(RELEASED, prompts), prompts, strict=True):
        expected = [*original.encode(prompt), 1]
        assert row[: len(expected)].tolist() == expected
        assert row.tolist() != other.tolist()


def test_small_model_equals_reference(small):
    assert_same(small, list(ODD_PROMPTS))
    assert_same(small, ["a small red circle moves left"] * 2, max_length=4)


@pytest.mark.parametrize("source", [pytest.param(RELEASED, marks=needs_released), None], ids=["released", "small"])
def test_what_transformers_5_saves_equals_reference(source, small, tmp_path):
    """tokenizer.json alone: without it, and with what it has, the ids are transformers' own."""
    T5Tokenizer.from_pretrained(source or small).save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    prompts = [*ODD_PROMPTS, "A" * 30, "a\x85b"]
    prompts += [line for path in PROMPTS.glob("*.txt") for line in path.read_text().splitlines()]
    for length in (226, 60):
        ours = Tokenizer(tmp_path / "tokenizer.json", max_length=length)(prompts)
        theirs = reference_ids(tmp_path, prompts, max_length=length)
        differing = [prompt for prompt, a, b in zip(prompts, ours, theirs, strict=True) if a.tolist() != b.tolist()]
        assert differing == []


def test_cut_text_of_a_tokenizer_json_is_reported(small, tmp_path, caplog):
    T5Tokenizer.from_pretrained(small).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        Tokenizer(tmp_path / "tokenizer.json", max_length=4)(["the red circle moves left"])
    assert "the last 2 are cut: 'moves left'" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "empty", "half", "not T5"])
def test_bad_tokenizer_json(damage, small, tmp_path):
    T5Tokenizer.from_pretrained(small).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    text = path.read_text()
    if damage == "missing":
        path.unlink()
    else:
        path.write_text({"empty": "", "half": text[: len(text) // 2], "not T5": text.replace("</s>", "<eos>")}[damage])
    with pytest.raises(InputError, match=re.escape(str(path))):
        Tokenizer(path)


def test_padding_truncation_and_empty(small):
    tokenizer = Tokenizer(small / "spiece.model", max_length=6)
    ids = tokenizer(["", "red circle", "the " * 5, "the " * 6])
    assert ids.shape == (4, 6)
    assert ids.dtype == np.int32
    assert ids[0].tolist() == [1, 0, 0, 0, 0, 0]
    the = ids[2, 0]
    assert ids[2].tolist() == ids[3].tolist() == [the] * 5 + [1]
    assert tokenizer([]).shape == (0, 6)


def test_cut_text_is_reported(small, caplog):
    tokenizer = Tokenizer(small / "spiece.model", max_length=4)
    with caplog.at_level(logging.WARNING):
        tokenizer(["the red circle"])
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        tokenizer(["the red circle moves <extra_id_7> left"])
    (record,) = caplog.records
    assert record.name == "cogvideox_flax.tokenizer"
    assert "6 tokens" in record.message
    assert "reads 3" in record.message
    assert "last 3 are cut: 'moves<extra_id_7> left'" in record.message
    caplog.clear()
    tokenizer(["circle " * 5000])
    assert len(caplog.text) < 500


def test_sentinels_that_the_model_has_no_rows_for_are_text(small):
    pieces = len(sentencepiece.SentencePieceProcessor(model_file=str(small / "spiece.model")))
    assert Tokenizer(small / "spiece.model", vocab_size=pieces)(["<extra_id_0>"]).max() < pieces


def test_tokens_that_the_text_encoder_does_not_have_are_refused(small):
    """A compiled program would read another row, or zeros, and say nothing."""
    ids = Tokenizer(small / "spiece.model")(["a red circle"])
    last = int(ids.max())
    np.testing.assert_array_equal(Tokenizer(small / "spiece.model", vocab_size=last + 1)(["a red circle"]), ids)
    message = f"{small} makes token {last} of the prompt, and the text encoder has tokens 0 to {last - 1}; copy both"
    with pytest.raises(InputError, match=re.escape(message)):
        Tokenizer(small / "spiece.model", vocab_size=last)(["a red circle"])


@pytest.mark.parametrize("damage", ["missing", "directory", "empty", "text", "half", "between pieces", "not T5"])
def test_bad_model_file(small, tmp_path, damage):
    path, raw = tmp_path / "spiece.model", (small / "spiece.model").read_bytes()
    if damage == "directory":
        path.mkdir()
    elif damage == "between pieces":
        end = raw.index(b"\x0a", raw.index("▁".encode()))  # the field tag of a later piece
        path.write_bytes(raw[:end])
        assert len(sentencepiece.SentencePieceProcessor(model_proto=raw[:end])) > 0  # it does load
    elif damage == "not T5":
        train(path)  # the library's own defaults: no pad, end of sequence 2
    elif damage != "missing":
        path.write_bytes({"empty": b"", "text": b"hello world\n" * 100, "half": raw[: len(raw) // 2]}[damage])
    with pytest.raises(InputError, match=str(path)):
        Tokenizer(path)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["ok", None], "must be a string; got None"),
        ([3], "must be a string; got 3"),
        ("a cat", "list of prompts"),
        (["a\ud800"], "not valid Unicode at character 1"),
    ],
)
def test_bad_prompts(small, prompts, message):
    with pytest.raises(InputError, match=message):
        Tokenizer(small / "spiece.model")(prompts)
