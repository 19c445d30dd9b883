"""The character tokenizer of the tiny models, and encoding that refuses characters a tokenizer does not know."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CHARACTERS = string.digits + string.ascii_lowercase + "+-*=() ,.:?"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of CHARACTERS, after the four special tokens; pads on the left, adds no special tokens.

    Special tokens written out in a text are text, so no prompt can hold an end of sequence.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        **SPECIAL_TOKENS,
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of `text`, without special tokens around it.

    Raises ValueError for an empty text and for characters the tokenizer does not know, naming them.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"{text!r} has no tokens; write a prompt and an answer of at least one character")
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in ids:
        characters = sorted(c for c in set(text) if unknown in tokenizer(c, add_special_tokens=False)["input_ids"])
        raise ValueError(f"the tokenizer does not know {characters} of {text!r}; change the task or the tokenizer")
    return ids
