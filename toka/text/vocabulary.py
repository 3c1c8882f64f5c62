"""What each token id stands for, in bytes."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece vocabularies write a space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(dict[int, bytes]):
    """Bytes by token id, worked out when first asked for; ids that no token has stand for none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        self.special: frozenset[int] = frozenset(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        """Tokens that mean something to the model and are no text."""
        decoder = tokenizer.decoder
        kind = json.loads(decoder.__getstate__())["type"] if decoder is not None else ""
        self.byte_level: bool = kind == "ByteLevel"
        """Whether text is simply the concatenated bytes of its tokens."""

    def __missing__(self, number: int) -> bytes:
        token = self.tokenizer.id_to_token(number)
        value = b"" if token is None else self._bytes(token)
        self[number] = value
        return value

    def is_byte(self, number: int) -> bool:
        """Whether the token is one byte of a character (`<0xE2>`) in a vocabulary that is not byte-level."""
        return not self.byte_level and _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(number) or "") is not None

    def token(self, text: str) -> int | None:
        """The token that is written like this."""
        number: int | None = self.tokenizer.token_to_id(text)
        return number

    def longest(self) -> int:
        """Most bytes that one token stands for. Works out all of them: some 0.2 s and 8 MB for 130,000."""
        return max(len(self[number]) for number in range(self.size))

    def _bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in token])
            except KeyError:  # an added token, written as it is
                return token.encode()
        one_byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(one_byte[1]) if one_byte else token.replace(SPACE_MARK, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Byte by the character that stands for it in byte-level BPE vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
