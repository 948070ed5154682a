"""Single tokens as text or bytes, in the format that the OpenAI API uses for log-probabilities."""

from functools import lru_cache

from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.decode_stream import is_byte_token
from cutaway.tokenizer.split_patterns import bytes_to_unicode


class TokenDecoder:
    """Decodes single tokens for log-probabilities and /tokenize."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.byte_of_character = {character: byte for byte, character in bytes_to_unicode().items()}
        self.token_bytes = lru_cache(65_536)(self._token_bytes)

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token. A byte-level token may be only part of a character."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text and all(character in self.byte_of_character for character in token):
            return bytes(self.byte_of_character[character] for character in token)
        if token.startswith("\u2581") and not text.startswith(" "):  # decoders drop the space at the start of a text
            text = " " + text
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """Return the token's text, or `bytes:\\x..` for a part of a character, as in the OpenAI API."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
