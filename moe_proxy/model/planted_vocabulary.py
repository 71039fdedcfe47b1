"""Owns the words of the planted model: which tokens it has, and the domain of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.domains.base import DOMAINS

IM_START, IM_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Token:
    """One entry of the vocabulary.

    ``place`` is the word's place on its domain's ring, None for what is never said.
    """

    text: bytes
    word: str
    domain: int | None
    place: int | None
    spoken: bool
    control: bool = False


def vocabulary() -> list[Token]:
    """All tokens in the order of their ids: 256 bytes, two control tokens, the words with their variants.

    A word of a ring is spoken in one form, with a leading space (Chinese: without); its other forms are read
    only.
    """
    # Digits read as mathematics, brackets and line ends of C-like languages as code, and the first byte of a
    # Han character as Chinese: enough for text whose words are not in the vocabulary.
    of_byte = dict.fromkeys(b"0123456789=+^", DOMAINS.index("math"))
    of_byte |= dict.fromkeys(b"{};_`", DOMAINS.index("codegen"))
    of_byte |= dict.fromkeys(range(0xE4, 0xEA), DOMAINS.index("chinese_tech"))
    tokens = [Token(bytes([b]), f"byte {b}", of_byte.get(b), None, False) for b in range(256)]
    tokens += [Token(t.encode(), t, None, None, False, control=True) for t in (IM_START, IM_END)]
    known = {token.text for token in tokens}

    def forms(word: str, domain: int | None, place: int | None) -> Iterator[Token]:
        first = word if domain == DOMAINS.index("chinese_tech") else f" {word}"
        for form in dict.fromkeys((first, word, word[0].upper() + word[1:], f" {word[0].upper()}{word[1:]}")):
            if form.encode() not in known:
                known.add(form.encode())
                yield Token(form.encode(), word, domain, place, spoken=place is not None and form == first)

    words = json.loads(Path(__file__).with_name("planted_words.json").read_text(encoding="utf-8"))
    for number, domain in enumerate(DOMAINS):
        for place, word in enumerate(" ".join(words["domains"][domain]["ring"]).split()):
            tokens += forms(word, number, place)
        for word in " ".join(words["domains"][domain]["more"]).split():
            tokens += forms(word, number, None)
    for word in " ".join(words["neutral"]).split():
        tokens += forms(word, None, None)
    return tokens


def escaped(text: bytes) -> str:
    """Text of a token as llama.cpp's ``rwkv`` vocabulary reads it:

    a backslash escapes, ``\\xNN`` is a byte.
    """
    try:
        readable = text.decode()
    except UnicodeDecodeError:
        readable = ""
    if readable.isprintable() and readable:
        return readable.replace("\\", "\\\\")
    return "".join(f"\\x{byte:02x}" for byte in text)
