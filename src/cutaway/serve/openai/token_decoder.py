"""How single tokens are written for clients: as text where they are text, as bytes where they are not."""

from functools import lru_cache

from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.decode_stream import is_byte_token
from cutaway.tokenizer.split_patterns import bytes_to_unicode


class TokenDecoder:
    """A tokenizer's tokens as OpenAI's log-probabilities show them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.byte_of_character = {character: byte for byte, character in bytes_to_unicode().items()}
        self.token_bytes = lru_cache(65_536)(self._token_bytes)

    def _token_bytes(self, token_id: int) -> bytes:
        """The token's bytes."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text and all(character in self.byte_of_character for character in token):
            return bytes(self.byte_of_character[character] for character in token)
        if token.startswith("\u2581") and not text.startswith(" "):  # a space that is dropped where a text begins
            text = " " + text
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """As text; what is only a part of a character as OpenAI writes it, so that no two are alike."""
        found = self.token_bytes(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
