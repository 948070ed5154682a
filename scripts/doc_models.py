"""Models that stand in for published ones where pages of the documentation name those: small, and without training.

They lie under well-known names, in the layout that these have: a page's commands run where nothing can be fetched.
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
"""By directory (a hub id is one too, and what lies here comes first): the preset it is made of, and its family."""


def write_doc_models(folder: Path) -> None:
    """Models under their names, and `corpus.txt`, some text."""
    for name, (preset, family) in PLACEHOLDER_MODELS.items():
        ct.save(build_checkpoint(preset), folder / name, family=family)
    (folder / "corpus.txt").write_text(make_corpus(), encoding="utf-8")


def build_checkpoint(preset: str) -> Checkpoint:
    """A model over bytes with fresh weights."""
    masks = ("[MASK]",) if "bert" in preset else ()
    tokenizer = byte_tokenizer(special_tokens=(*SPECIAL_TOKENS, *masks))
    tokenizer.chat_template = CHAT_TEMPLATE
    config = ct.config(preset)
    config = ct.config({**config.model_dump(mode="json"), "vocab_size": 256 + len(SPECIAL_TOKENS) + len(masks)})
    model = ct.build(config, seed=0)
    return Checkpoint(model, config, hf_config=extra_settings(config), tokenizer_loader=lambda: tokenizer)


def extra_settings(config: Config) -> dict[str, Any]:
    return {"decoder_start_token_id": 0} if config.form == "encoder-decoder" else {}


def make_corpus() -> str:
    """Sums, right ones: short, and something can be learnt from them."""
    numbers = torch.randint(100, (400, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return "".join(f"{a} and {b} make {a + b}\n" for a, b in numbers)


if __name__ == "__main__":
    write_doc_models(Path.cwd())
