"""Training equals a plain PyTorch loop around transformers step by step: GPT-2, BERT and T5, fifty steps in fp32."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_configs import untie_lm_head
from support.nightly import nightly_except
from torch import Tensor
from torch.nn import functional as F

import cutaway as ct
from cutaway.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from cutaway.train.objectives.objective import Objective
from cutaway.train.optim.lr_scheduler import lr_factor
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer
from cutaway.train.trainer.train_step import metrics_to_python
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")

STEPS = 50
LR, WEIGHT_DECAY, BETAS = 3e-3, 0.1, (0.9, 0.95)
LogitsFn = Callable[[Any, Objective], Tensor]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def addition_pairs(count: int) -> list[dict[str, str]]:
    """Questions of different lengths, so that batches have padding, and their answers."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        a, b = rng.randrange(2000), rng.randrange(300)
        rows.append({"text": f"{a} and {b} make what?", "target": f"{a + b}, " * (1 + a % 3)})
    return rows


def save_tokenizer_with_mask(directory: Path) -> Tokenizer:
    """Train a small tokenizer with a mask token, and save it."""
    trained = train_bpe([row["text"] for row in addition_pairs(50)], 300, special_tokens=("<|eos|>", "<|mask|>"))
    tokenizer = Tokenizer(trained.backend, special_tokens_map=trained.special_tokens_map | {"mask_token": "<|mask|>"})
    tokenizer.save(directory)
    return tokenizer


def build_trainer(reference: Any, tokenizer: Path, objective: dict[str, Any], tmp_path: Path) -> Trainer:
    """A trainer with the reference's weights, on generated texts."""
    has_targets = objective["kind"] == "seq2seq"
    # transformers attends across documents in a sequence, so there are two long documents: one is for training.
    pairs = addition_pairs(300)
    text = "\n".join(row["text"] for row in pairs)
    rows = pairs if has_targets else [{"text": text}, {"text": text[::-1]}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reference.save_pretrained(tmp_path / "reference")
    loaded = ct.load(tmp_path / "reference")
    recipe: dict[str, Any] = {
        "model": loaded.config.model_dump(mode="json"),
        "data": {
            "sources": [{"path": str(tmp_path / "texts.jsonl")} | ({"target_column": "target"} if has_targets else {})],
            "tokenizer": {"kind": "pretrained", "path": str(tokenizer)},
            "seq_len": 40,
            "validation_split": 0.5,
        },
        "objective": objective,
        "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
        "schedule": {"warmup_steps": 5},
        "training": {"max_steps": STEPS, "batch_size": 4, "seed": 3},
    }
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    trainer.model.load_state_dict(loaded.model.state_dict())
    trainer.model.train()
    return trainer


def assert_equal_losses(trainer: Trainer, reference: Any, logits_fn: LogitsFn) -> None:
    """Train both on the same batches: losses within 1e-5 at every step."""
    reference.train()
    named = [(name, p) for name, p in reference.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim > 1 and "bias" not in name]
    not_decayed = [p for name, p in named if p.ndim < 2 or "bias" in name]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: lr_factor(trainer.recipe.schedule, n, STEPS))
    batch_size, first_loss, num_clipped = trainer.recipe.training.batch_size, 0.0, 0
    for step in range(STEPS):
        batch = trainer.data.train.get_batch(step * batch_size, batch_size)
        objective = trainer.objective_fn(batch, step * batch_size)
        metrics = metrics_to_python(trainer.train_step(step))
        targets = objective.targets.masked_fill(objective.weights == 0, -100)
        loss = F.cross_entropy(logits_fn(reference, objective).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        num_clipped += int(grad_norm > 1)
        optimizer.step()
        schedule.step()
        first_loss = loss.item() if step == 0 else first_loss
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5), step
    assert loss.item() < 0.9 * first_loss, "the loss does not decrease, so the comparison is not meaningful"
    assert num_clipped, "no gradient was clipped"


@pytest.mark.unchecked
def test_gpt2(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer")
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": 259, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropouts))
    trainer = build_trainer(reference, tmp_path / "tokenizer", {"kind": "causal-lm"}, tmp_path)
    assert_equal_losses(trainer, reference, lambda model, objective: model(*objective.inputs).logits)


@pytest.mark.unchecked
def test_bert_with_unused_pooler(tmp_path: Path) -> None:
    """Parameters without a gradient do not change."""
    tokenizer = save_tokenizer_with_mask(tmp_path / "tokenizer")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=64, pad_token_id=None, **shape, **dropouts
    )
    reference = transformers.BertForPreTraining(config)
    trainer = build_trainer(reference, tmp_path / "tokenizer", {"kind": "masked-lm", "mlm_probability": 0.3}, tmp_path)
    assert trainer.model.pooler is not None
    before = trainer.model.pooler.dense.weight.clone()
    assert_equal_losses(trainer, reference, lambda model, objective: model(*objective.inputs).prediction_logits)
    assert torch.equal(trainer.model.pooler.dense.weight, before)


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", nightly_except(("tied",), ("tied", "v1.1")))
def test_t5(kind: str, tmp_path: Path) -> None:
    """Narrow, because a ReLU input that rounds to different signs changes a gradient by more than rounding."""
    byte_tokenizer().save(tmp_path / "tokenizer")
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    newer = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if kind == "v1.1" else {}
    reference = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=259, decoder_start_token_id=256, pad_token_id=258, **shape, **newer)
    )
    if kind == "v1.1":
        untie_lm_head(reference)
    trainer = build_trainer(reference, tmp_path / "tokenizer", {"kind": "seq2seq"}, tmp_path)
    assert trainer.model.config.head.tied == (kind == "tied")

    has_padding: list[bool] = []

    def logits_fn(model: Any, objective: Objective) -> Tensor:
        source, target, source_mask, target_mask = objective.inputs
        has_padding.append(source_mask is not None and target_mask is not None)
        return model(
            input_ids=source,
            decoder_input_ids=target,
            attention_mask=source_mask,
            decoder_attention_mask=target_mask,
        ).logits

    assert_equal_losses(trainer, reference, logits_fn)
    assert any(has_padding)
