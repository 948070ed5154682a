"""Compare DPO, IPO, KTO and ORPO losses and gradients with the loss functions of TRL's trainers, in fp64.

    pip install --no-deps --target /tmp/trl trl
    python bench/preference_losses.py --trl /tmp/trl [--json FILE]

The functions are read from the source of TRL and run on a model whose logits are a random table. So TRL's dependencies
are not needed. TRL's ORPO casts to fp32; the cast is replaced by one to fp64.
"""

import argparse
import ast
import math
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from report import add_json_option, print_row, save_rows
from torch import Tensor, nn

from cutaway.train.data.datasets import Row
from cutaway.train.data.preference_dataset import AnswerBatch, LabeledDataset, PairDataset
from cutaway.train.objectives.preference import dpo, kto, orpo
from cutaway.train.objectives.reference_model import ReferenceModel
from cutaway.train.recipe.preference_objectives import DPOConfig, KTOConfig, ORPOConfig

VOCAB, NUM_PAIRS, BETA = 50, 16, 0.3
IGNORED = -100
MAX_ERROR = 1e-9


class BigramModel(nn.Module):
    """A model whose logits depend on the last token only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator))
        self.head, self.device, self.stacks = nn.Identity(), torch.device("cpu"), dict[str, Any]()

    def hidden_states(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def use_activation_checkpointing(self, kind: str) -> "BigramModel":
        return self

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        """Outputs of a transformers model, and those of TRL's fused head."""
        logits = self.table[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        targets = labels[:, 1:]
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        zeros = torch.zeros_like(log_probs)
        return SimpleNamespace(
            log_probs=torch.where(targets == IGNORED, 0.0, log_probs),
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros > 0,
        )


def read_functions(path: Path, names: set[str], namespace: dict[str, Any]) -> SimpleNamespace:
    """Functions and methods of a Python file, by name, without running the rest of the file."""
    found: list[Any] = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    functions = dict(namespace)
    exec(compile(ast.Module(found, type_ignores=[]), str(path), "exec"), functions)
    return SimpleNamespace(**{node.name: functions[node.name] for node in found})


def trainer_attributes(reference: BigramModel | None, **attributes: Any) -> SimpleNamespace:
    """Attributes of a TRL trainer that the loss functions read."""
    gather = mock.Mock(side_effect=lambda value: value)
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=gather, gather_for_metrics=gather)
    metrics = {mode: mock.MagicMock() for mode in ("train", "eval")}
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        is_encoder_decoder=False,
        **attributes,
    )


@contextmanager
def no_checkpointing(*_: Any) -> Any:
    yield


NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "math": math,
    "nullcontext": nullcontext,
    "disable_gradient_checkpointing": no_checkpointing,
    "is_peft_model": lambda model: False,
    "is_torch_xla_available": lambda: False,
    "selective_log_softmax": lambda logits, labels: logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1),
}


def random_pairs() -> list[Row]:
    rng, rows = np.random.default_rng(0), []
    for _ in range(NUM_PAIRS):
        prompt = rng.integers(VOCAB, size=rng.integers(1, 9))
        row: list[Any] = []
        for _ in range(2):
            answer = rng.integers(VOCAB, size=rng.integers(1, 20))
            row += [np.concatenate([prompt, answer]), np.repeat([0, 1], [len(prompt), len(answer)])]
        rows.append(tuple(row))
    return rows


def trl_inputs(answers: AnswerBatch, prefix: str = "") -> dict[str, Tensor]:
    tensors = answers.tokens, answers.is_token.long(), answers.is_target.long()
    return dict(
        zip((f"{prefix}input_ids", f"{prefix}attention_mask", f"{prefix}completion_mask"), tensors, strict=True)
    )


def trl_orpo(path: Path, answers: AnswerBatch, policy: BigramModel) -> Tensor:
    names = {"log1mexp", "odds_ratio_loss", "get_batch_logps", "concatenated_forward", "get_batch_loss_metrics"}
    functions = read_functions(path / "experimental" / "orpo" / "orpo_trainer.py", names, NAMESPACE)
    trainer = trainer_attributes(None, beta=BETA, padding_value=0)
    labels = torch.where(answers.is_target, answers.tokens, IGNORED)
    inputs = {
        "concatenated_input_ids": answers.tokens,
        "concatenated_attention_mask": answers.is_token.long(),
        "concatenated_labels": labels,
    }
    trainer.concatenated_inputs = lambda *_, **__: inputs
    trainer.get_batch_logps = functions.get_batch_logps
    trainer.concatenated_forward = lambda *args: functions.concatenated_forward(trainer, *args)
    trainer.odds_ratio_loss = lambda *args: functions.odds_ratio_loss(trainer, *args)
    model = lambda tokens, **_: policy(tokens)  # noqa: E731
    with mock.patch.object(Tensor, "float", Tensor.double):
        loss, _ = functions.get_batch_loss_metrics(trainer, model, {"chosen_labels": labels[:NUM_PAIRS]})
    return loss


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="directory that contains the package trl")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    path = args.trl / "trl"
    policy, reference, frozen = BigramModel(0), BigramModel(1), ReferenceModel(BigramModel(1))  # type: ignore[arg-type]
    rows = random_pairs()
    pairs = PairDataset(rows, 0, pad_id=0).collate(rows)
    results: list[tuple[str, Tensor, Tensor, BigramModel]] = []

    for loss_type in ("sigmoid", "ipo"):
        trainer = trainer_attributes(
            reference,
            beta=BETA,
            loss_types=[loss_type],
            loss_weights=[1.0],
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            use_weighting=False,
            label_smoothing=0.0,
        )
        compute_loss = read_functions(path / "trainer" / "dpo_trainer.py", {"_compute_loss"}, NAMESPACE)._compute_loss
        theirs = compute_loss(trainer, policy, trl_inputs(pairs.answers), False)
        ours = dpo(pairs, DPOConfig(beta=BETA, loss_type=loss_type), frozen).loss(policy)  # type: ignore[arg-type]
        results.append((f"dpo, {loss_type}", ours.loss / ours.weight, theirs, policy))

    labeled = [(*(row[:2] if i % 3 else row[2:]), np.array([i % 3 > 0])) for i, row in enumerate(rows)]
    batch = LabeledDataset(labeled, 0, pad_id=0, max_tokens=99, group_size=None, shuffle=False).get_batch(0, NUM_PAIRS)
    for seed in (0, 3):  # with a negative and with a positive mean log ratio of mismatched answers
        policy = BigramModel(seed)
        config = KTOConfig(beta=BETA, desirable_weight=1.2, undesirable_weight=0.7)
        trainer = trainer_attributes(
            reference, beta=BETA, loss_type="kto", calculate_KL=True, desirable_weight=1.2, undesirable_weight=0.7
        )
        names = {"_compute_loss", "_compute_kl_logps"}
        functions = read_functions(path / "trainer" / "kto_trainer.py", names, NAMESPACE)
        trainer._compute_kl_logps = partial(functions._compute_kl_logps, trainer)
        inputs = trl_inputs(batch.answers) | trl_inputs(batch.mismatched, "KL_") | {"label": batch.is_desirable}
        theirs = functions._compute_loss(trainer, policy, inputs, False)
        ours = kto(batch, config, frozen).loss(policy)  # type: ignore[arg-type]
        kl = float(ours.metrics["kl"].total / ours.metrics["kl"].weight)
        results.append((f"kto, kl {kl:.2f}", ours.loss / ours.weight, theirs, policy))

    policy = BigramModel(0)
    ours = orpo(pairs, ORPOConfig(beta=BETA)).loss(policy)  # type: ignore[arg-type]
    results.append(("orpo", ours.loss / ours.weight, trl_orpo(path, pairs.answers, policy), policy))

    worst, rows_out = 0.0, []
    for name, loss, expected, model in results:
        grad, expected_grad = (torch.autograd.grad(each, [model.table])[0] for each in (loss, expected))
        error, grad_error = abs(float((loss - expected).detach())), float((grad - expected_grad).abs().max())
        worst = max(worst, error, grad_error)
        row = {"case": name, "loss": float(loss.detach()), "loss_difference": error}
        row |= {"largest_gradient": float(grad.abs().max()), "gradient_difference": grad_error}
        rows_out.append(print_row(row))
    save_rows(args.json, rows_out)
    sys.exit(worst > MAX_ERROR)


if __name__ == "__main__":
    main()
