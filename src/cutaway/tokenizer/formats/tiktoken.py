"""tiktoken files: one line per token with its bytes in base64 and its rank. https://github.com/openai/tiktoken"""

import base64
import binascii
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE
from cutaway.tokenizer.split_patterns import build_byte_level_pre_tokenizer, bytes_to_unicode
from cutaway.tokenizer.vocabulary import Vocabulary, generate_merges


def is_tiktoken_file(data: bytes) -> bool:
    """Whether data is a tiktoken file (tokenizer.model in Llama 3). SentencePiece models start with a newline."""
    line = data[:4096].split(b"\n", 1)[0].split()
    return len(line) == 2 and line[1].isdigit() and len(line[0]) % 4 == 0


def parse_tiktoken(data: bytes, source: object) -> Vocabulary:
    """Parse a tiktoken file to a BPE vocabulary with generated merges."""
    byte_to_char = bytes_to_unicode()
    ids: dict[str, int] = {}
    for line_number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            if len(parts) != 2 or len(parts[1]) > 9:
                raise ValueError("not two words")
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (ValueError, binascii.Error) as error:
            raise InputError(f"{source} line {line_number} is not a base64 token and its rank; fix it") from error
        if not 0 <= rank < MAX_VOCAB_SIZE or not token:
            raise InputError(f"{source} line {line_number} has rank {rank} or an empty token; download the file again")
        ids["".join(byte_to_char[byte] for byte in token)] = rank
    if not ids:
        raise InputError(f"{source} has no tokens; download the file again")
    return Vocabulary("BPE", ids=ids, merges=generate_merges(ids))


def build_tiktoken_pipeline(vocabulary: Vocabulary, patterns: Sequence[str]) -> Tokenizer:
    """Build a byte-level BPE tokenizer with these split patterns."""
    model = BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=False, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = build_byte_level_pre_tokenizer(patterns)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
