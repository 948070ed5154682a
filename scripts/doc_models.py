"""Small untrained models in place of the published models that documentation pages use.

They are saved under the published names and in the same format, so that the commands of a page run offline.
"""

from pathlib import Path
from typing import Any

import torch

import cutaway as ct
from cutaway.config import Config
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import byte_tokenizer

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
PLACEHOLDER_MODELS: dict[str, tuple[str, str]] = {
    "openai-community/gpt2": ("tiny-gpt", "gpt2"),
    "HuggingFaceTB/SmolLM2-135M": ("tiny-llama", "llama"),
    "google-bert/bert-base-uncased": ("tiny-bert", "bert"),
    "google-t5/t5-small": ("tiny-t5", "t5"),
    "Llama-3.2-1B": ("tiny-llama", "llama"),
    "my-model": ("tiny-llama", "llama"),
}
"""{directory: (preset, family)}. A local directory takes precedence over a hub id of the same name."""


def write_doc_models(folder: Path) -> None:
    """Write all placeholder models, and a text file `corpus.txt` for training, to a folder."""
    for name, (preset, family) in PLACEHOLDER_MODELS.items():
        ct.save(build_checkpoint(preset), folder / name, family=family)
    (folder / "corpus.txt").write_text(make_corpus(), encoding="utf-8")


def build_checkpoint(preset: str) -> Checkpoint:
    """Build a checkpoint of a preset with random weights and a byte tokenizer."""
    mask_tokens = ("[MASK]",) if "bert" in preset else ()
    tokenizer = byte_tokenizer(special_tokens=(*SPECIAL_TOKENS, *mask_tokens))
    tokenizer.chat_template = CHAT_TEMPLATE
    config = ct.config(preset)
    config = ct.config({**config.model_dump(mode="json"), "vocab_size": 256 + len(SPECIAL_TOKENS) + len(mask_tokens)})
    model = ct.build(config, seed=0)
    return Checkpoint(model, config, hf_config=extra_settings(config), tokenizer_loader=lambda: tokenizer)


def extra_settings(config: Config) -> dict[str, Any]:
    return {"decoder_start_token_id": 0} if config.form == "encoder-decoder" else {}


def make_corpus() -> str:
    """Return 400 lines of correct additions, which a small model can learn."""
    numbers = torch.randint(100, (400, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return "".join(f"{a} and {b} make {a + b}\n" for a, b in numbers)


if __name__ == "__main__":
    write_doc_models(Path.cwd())
