"""tiktoken's files: a line for each token, its bytes in base64 and its rank. https://github.com/openai/tiktoken"""

import base64
import binascii
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from cutaway.errors import InputError
from cutaway.text.files import MOST_TOKENS
from cutaway.text.splits import byte_characters, byte_level
from cutaway.text.vocabulary import Vocabulary, merges_of


def is_tiktoken(data: bytes) -> bool:
    """Llama 3 calls such a file tokenizer.model, SentencePiece's name. A SentencePiece model begins with a newline."""
    line = data[:4096].split(b"\n", 1)[0].split()
    return len(line) == 2 and line[1].isdigit() and len(line[0]) % 4 == 0


def parse(data: bytes, where: object) -> Vocabulary:
    shown = byte_characters()
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
            raise InputError(f"{where} line {number} is not a token in base64 and its rank; get it again") from error
        if not 0 <= rank < MOST_TOKENS or not token:
            raise InputError(f"{where} line {number} has rank {rank} or an empty token; get the file again")
        ids["".join(shown[byte] for byte in token)] = rank
    if not ids:
        raise InputError(f"{where} holds no tokens; get the file again")
    return Vocabulary("BPE", ids=ids, merges=merges_of(ids))


def pipeline(vocabulary: Vocabulary, patterns: Sequence[str]) -> Tokenizer:
    model = BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=False, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = byte_level(patterns)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
