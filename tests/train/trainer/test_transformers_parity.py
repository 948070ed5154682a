"""Training step for step beside a plain PyTorch loop around transformers: GPT-2, BERT and T5, fifty steps in fp32."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_configs import untie_lm_head
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
RATE, DECAY, BETAS = 3e-3, 0.1, (0.9, 0.95)
Logits = Callable[[Any, Objective], Tensor]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def sums(count: int) -> list[dict[str, str]]:
    """Questions of several lengths, so that some of a batch is padding, and their answers."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(2000), draw.randrange(300)
        rows.append({"text": f"{a} and {b} make what?", "target": f"{a + b}, " * (1 + a % 3)})
    return rows


def with_a_mask(directory: Path) -> Tokenizer:
    """Few tokens, one of them a mask."""
    made = train_bpe([row["text"] for row in sums(50)], 300, special_tokens=("<|eos|>", "<|mask|>"))
    named = Tokenizer(made.backend, special_tokens_map=made.special_tokens_map | {"mask_token": "<|mask|>"})
    named.save(directory)
    return named


def trainer_from(theirs: Any, tokenizer: Path, objective: dict[str, Any], tmp_path: Path) -> Trainer:
    """Our trainer from their weights, over texts written here."""
    pairs = objective["kind"] == "seq2seq"
    # The peers see across documents that share a sequence, so there are two long ones: one is learned from.
    rows = sums(300) if pairs else [{"text": "\n".join(row["text"] for row in sums(300))[::way]} for way in (1, -1)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    theirs.save_pretrained(tmp_path / "peer")
    loaded = ct.load(tmp_path / "peer")
    how: dict[str, Any] = {
        "model": loaded.config.model_dump(mode="json"),
        "data": {
            "sources": [{"path": str(tmp_path / "texts.jsonl")} | ({"target_column": "target"} if pairs else {})],
            "tokenizer": {"kind": "pretrained", "path": str(tokenizer)},
            "seq_len": 40,
            "validation_split": 0.5,
        },
        "objective": objective,
        "optimizer": {"lr": RATE, "betas": BETAS, "weight_decay": DECAY},
        "schedule": {"warmup_steps": 5},
        "training": {"max_steps": STEPS, "batch_size": 4, "seed": 3},
    }
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    trainer.model.load_state_dict(loaded.model.state_dict())
    trainer.model.train()
    return trainer


def compare(trainer: Trainer, theirs: Any, logits: Logits) -> None:
    """The same batches for both: losses within 1e-5 at every step."""
    theirs.train()
    named = [(name, p) for name, p in theirs.named_parameters() if p.requires_grad]
    decaying = [p for name, p in named if p.ndim > 1 and "bias" not in name]
    staying = [p for name, p in named if p.ndim < 2 or "bias" in name]
    groups = [{"params": decaying, "weight_decay": DECAY}, {"params": staying, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: lr_factor(trainer.recipe.schedule, n, STEPS))
    batch, first, clipped = trainer.recipe.training.batch_size, 0.0, 0
    for number in range(STEPS):
        task = trainer.objective_fn(trainer.data.train.get_batch(number * batch, batch), number * batch)
        row = metrics_to_python(trainer.train_step(number))
        targets = task.targets.masked_fill(task.weights == 0, -100)
        loss = F.cross_entropy(logits(theirs, task).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        clipped += int(length > 1)
        optimizer.step()
        schedule.step()
        first = loss.item() if number == 0 else first
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5), number
    assert loss.item() < 0.9 * first, "it learns, so that steps have something to differ in"
    assert clipped, "and some gradients are clipped"


@pytest.mark.unchecked
def test_gpt2(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer")
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": 259, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropouts))
    trainer = trainer_from(theirs, tmp_path / "tokenizer", {"kind": "causal-lm"}, tmp_path)
    compare(trainer, theirs, lambda model, task: model(*task.inputs).logits)


@pytest.mark.unchecked
def test_bert_whose_pooler_nobody_uses(tmp_path: Path) -> None:
    """What has no gradient stays as it was, for both."""
    tokenizer = with_a_mask(tmp_path / "tokenizer")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=64, pad_token_id=None, **shape, **dropouts
    )
    theirs = transformers.BertForPreTraining(config)
    trainer = trainer_from(theirs, tmp_path / "tokenizer", {"kind": "masked-lm", "mlm_probability": 0.3}, tmp_path)
    assert trainer.model.pooler is not None
    before = trainer.model.pooler.dense.weight.clone()
    compare(trainer, theirs, lambda model, task: model(*task.inputs).prediction_logits)
    assert torch.equal(trainer.model.pooler.dense.weight, before)


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", ["tied", "v1.1"])
def test_t5(kind: str, tmp_path: Path) -> None:
    """Narrow, since a ReLU that rounding alone holds above 0 on one side only changes a gradient by more than that."""
    byte_tokenizer().save(tmp_path / "tokenizer")
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    newer = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if kind == "v1.1" else {}
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=259, decoder_start_token_id=256, pad_token_id=258, **shape, **newer)
    )
    if kind == "v1.1":
        untie_lm_head(theirs)
    trainer = trainer_from(theirs, tmp_path / "tokenizer", {"kind": "seq2seq"}, tmp_path)
    assert trainer.model.config.head.tied == (kind == "tied")

    padded: list[bool] = []

    def logits(model: Any, task: Objective) -> Tensor:
        source, target, source_mask, target_mask = task.inputs
        padded.append(source_mask is not None and target_mask is not None)
        masks = {"attention_mask": source_mask, "decoder_attention_mask": target_mask}
        return model(input_ids=source, decoder_input_ids=target, **masks).logits

    compare(trainer, theirs, logits)
    assert any(padded)
