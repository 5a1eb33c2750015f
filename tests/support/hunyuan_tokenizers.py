"""Small tokenizers in the layout of HunyuanVideo-1.5, made here."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen2.5's, for texts alone."""

WORDS = ["You are a helpful assistant. Describe the video by detailing the following aspects", "a cat plays the guitar"]


def save_qwen_tokenizer(folder: Path, *, parts: bool = False) -> int:
    """A byte-level BPE, trained on a few words. Returns the size of its vocabulary.

    parts: vocab.json and merges.txt in place of tokenizer.json.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        WORDS * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=TEMPLATE, padding_side="right"
    )
    whole.save_pretrained(folder)
    if parts:  # as transformers 4 wrote them
        bpe.model.save(str(folder))
        (folder / "tokenizer.json").unlink()
        path = folder / "tokenizer_config.json"
        added = {str(bpe.token_to_id(token)): {"content": token, "special": True} for token in SPECIAL}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": added}))
    return bpe.get_vocab_size()


def save_byt5_tokenizer(folder: Path) -> None:
    """transformers' own, which has no vocabulary."""
    transformers.ByT5Tokenizer().save_pretrained(folder)
