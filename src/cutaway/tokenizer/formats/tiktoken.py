"""tiktoken's files: a line for each token, its bytes in base64 and its rank. https://github.com/openai/tiktoken"""

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
    """Llama 3 calls such a file tokenizer.model, SentencePiece's name. A SentencePiece model begins with a newline."""
    line = data[:4096].split(b"\n", 1)[0].split()
    return len(line) == 2 and line[1].isdigit() and len(line[0]) % 4 == 0


def parse_tiktoken(data: bytes, source: object) -> Vocabulary:
    shown = bytes_to_unicode()
    ids: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            if len(parts) != 2 or len(parts[1]) > 9:
                raise ValueError("not two words")
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (ValueError, binascii.Error) as error:
            raise InputError(f"{source} line {number} is not a token in base64 and its rank; get it again") from error
        if not 0 <= rank < MAX_VOCAB_SIZE or not token:
            raise InputError(f"{source} line {number} has rank {rank} or an empty token; get the file again")
        ids["".join(shown[byte] for byte in token)] = rank
    if not ids:
        raise InputError(f"{source} holds no tokens; get the file again")
    return Vocabulary("BPE", ids=ids, merges=generate_merges(ids))


def build_tiktoken_pipeline(vocabulary: Vocabulary, patterns: Sequence[str]) -> Tokenizer:
    model = BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=False, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = build_byte_level_pre_tokenizer(patterns)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
