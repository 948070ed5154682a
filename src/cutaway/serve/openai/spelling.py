"""How single tokens are written for clients: as text where they are text, as bytes where they are not."""

from functools import lru_cache

from cutaway.text import Tokenizer
from cutaway.text.splits import byte_characters
from cutaway.text.stream import is_byte


class Spelling:
    """A tokenizer's tokens as OpenAI's log-probabilities show them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes = {character: byte for byte, character in byte_characters().items()}
        self.of = lru_cache(65_536)(self._of)

    def _of(self, number: int) -> bytes:
        """The token's bytes."""
        token = self.tokenizer.token(number)
        if token is None:
            return b""
        if is_byte(token):
            return bytes([int(token[3:5], 16)])
        text = self.tokenizer.decode([number], skip_special=False)
        if "\ufffd" in text and all(character in self.bytes for character in token):
            return bytes(self.bytes[character] for character in token)
        if token.startswith("\u2581") and not text.startswith(" "):  # a space that is dropped where a text begins
            text = " " + text
        return text.encode()

    def text(self, number: int) -> str:
        """As text; what is only a part of a character as OpenAI writes it, so that no two are alike."""
        found = self.of(number)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
