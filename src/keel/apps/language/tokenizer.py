"""A tokenizer of single characters, built in code: nothing is downloaded, nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keel.apps.language.tasks.protocol import CHARACTERS, TAGS
from keel.errors import InputError, import_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
"""Tokens 0, 1 and 2."""
CONTROLS = (PAD, EOS, BOS)
UNKNOWN = "<unk>"
"""No token: without one, a character that is not known is an error and not a hole in the text."""


def build_tokenizer(
    characters: str = CHARACTERS, specials: Sequence[str] = TAGS
) -> PreTrainedTokenizerFast:
    """Build a tokenizer: one token a character, one for each of `specials`, padding on the left.

    Tokens are numbered `<pad>`, `<eos>`, `<bos>`, then `specials`, then `characters`. Decoding with
    `skip_special_tokens` leaves out the first three only: tags are text. `save_pretrained` writes
    what `AutoTokenizer` reads. Text goes in by `encode` below, which names a character that is not
    known; the tokenizer itself refuses it too, but says less.

    Examples:
        >>> tokenizer = build_tokenizer("abc ", ["<search>"])
        >>> encode(tokenizer, "<search>a b")
        [3, 4, 7, 5]
        >>> tokenizer.decode([0, 0, 3, 4, 7, 5, 1], skip_special_tokens=True)
        '<search>a b'
    """
    _check(characters, specials)
    library, transformers = (
        import_extra("tokenizers", "language"),
        import_extra("transformers", "language"),
    )
    names = [*CONTROLS, *specials, *characters]
    backend = library.Tokenizer(
        library.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
    backend.decoder = library.decoders.Fuse()
    backend.add_special_tokens(list(CONTROLS))
    backend.add_tokens(list(specials))
    tokenizer: PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text and nothing added; works with any tokenizer of Hugging Face."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the library has no error of its own for this
        place = _first_unknown(tokenizer, text)
        if place is None:
            raise
        raise InputError(
            f"text {text[:60]!r}: character {text[place]!r} at position {place} is not in the "
            "tokenizer's alphabet; leave it out, or build the tokenizer with it"
        ) from error
    return ids


def _first_unknown(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    vocabulary, tags = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    pattern = re.compile("|".join(map(re.escape, tags)))
    inside = {i for match in pattern.finditer(text) for i in range(*match.span())}
    unknown = (i for i, x in enumerate(text) if i not in inside and x not in vocabulary)
    return next(unknown, None)


def _check(characters: str, specials: Sequence[str]) -> None:
    """Raise unless every token has one name and no name is two tokens."""
    if not characters:
        raise InputError("characters: expected at least one")
    twice = sorted({x for x in characters if characters.count(x) > 1})
    if twice:
        raise InputError(f"characters: {twice[0]!r} is there twice")
    names = [*CONTROLS, UNKNOWN, *characters]
    for name in specials:
        if len(name) < 2:
            raise InputError(f"specials: {name!r} is too short for a tag, such as '<search>'")
        if name in names:
            raise InputError(f"specials: {name!r} is taken already")
        names.append(name)
