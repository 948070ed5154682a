"""Claims about the loss, initialization, teacher forcing and activation checkpointing."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model, random_tokens
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import cutaway as ct
from cutaway import config as c
from cutaway.model import Transformer
from cutaway.train.objectives.masked_lm import masked_lm
from cutaway.train.objectives.objective import causal_lm


def build_decoder(name: str = "tiny-gpt") -> tuple[Transformer, Tensor]:
    """A decoder in fp64 with random weights, and ten tokens."""
    config = ct.config(name)
    return build_randomized_model(config, torch.float64), random_tokens(config, 1, 10, 0)


def mean_loss(model: Transformer, tokens: Tensor) -> Tensor:
    sums = causal_lm(tokens).loss(model)
    return sums.loss / sums.weight


@torch.no_grad()
def test_c175_loss_is_the_mean_negative_log_probability_of_each_next_token() -> None:
    """The loss of one pass over all positions equals that of a separate pass per prefix."""
    model, tokens = build_decoder()
    log_probs = [model(tokens[:, :t])[0, -1].log_softmax(-1)[tokens[0, t]] for t in range(1, 10)]
    torch.testing.assert_close(mean_loss(model, tokens), -torch.stack(log_probs).mean())


@torch.no_grad()
def test_c176_perplexity_is_exp_of_the_loss() -> None:
    """It is 1 for a certain and correct prediction and V for a uniform one; an untrained model is near V."""
    model = ct.build("tiny-gpt", seed=0, dtype=torch.float64)
    vocab_size = model.config.vocab_size
    assert math.exp(mean_loss(model, random_tokens(model.config, 4, 60, 0))) == pytest.approx(vocab_size, rel=0.03)
    tokens = torch.full((1, 10), 3)
    model.head.matrix.weight.zero_()
    assert math.exp(mean_loss(model, tokens)) == pytest.approx(vocab_size)
    model.decoder.final_norm.bias.fill_(1.0)
    model.head.matrix.weight[3] = 100.0
    assert math.exp(mean_loss(model, tokens)) == pytest.approx(1.0)


def test_c177_masked_lm_loss_is_over_masked_positions_only() -> None:
    config = ct.config("tiny-bert")
    model, tokens = build_randomized_model(config, torch.float64), random_tokens(config, 2, 24, 0)
    objective = masked_lm(tokens, mask_id=1, vocab_size=config.vocab_size, seed=0, positions=[0, 1])
    is_masked = objective.weights.bool()
    assert torch.equal(objective.inputs[0][~is_masked], tokens[~is_masked])
    sums = objective.loss(model)
    expected = F.cross_entropy(model(objective.inputs[0])[is_masked], tokens[is_masked])
    torch.testing.assert_close(sums.loss / sums.weight, expected)
    assert 0 < is_masked.sum() == int(sums.weight) < tokens.numel()


@torch.no_grad()
def test_c178_teacher_forcing_conditions_on_the_gold_tokens() -> None:
    """The logits at t depend on the gold tokens up to t and on nothing that the model predicts."""
    model, tokens = build_decoder()
    inputs = causal_lm(tokens).inputs[0]
    assert torch.equal(inputs, tokens[:, :-1])
    for t in range(9):
        torch.testing.assert_close(model(inputs)[:, t], model(tokens[:, : t + 1])[:, -1])
    assert not torch.equal(model(inputs).argmax(-1)[:, :-1], tokens[:, 1:-1])  # its predictions differ from the inputs


@torch.no_grad()
def test_c180_training_and_generation_agree_for_equal_prefixes_only() -> None:
    model, tokens = build_decoder()
    gold, own = model(tokens), tokens[:, :1]
    for _ in range(9):
        own = torch.cat((own, model(own)[:, -1:].argmax(-1)), 1)
    parallel = model(own)
    stepwise = torch.stack([model(own[:, : t + 1])[:, -1] for t in range(10)], 1)
    torch.testing.assert_close(parallel, stepwise)  # same prefix: same logits
    assert torch.equal(own[:, 1:], parallel[:, :-1].argmax(-1))
    assert not torch.equal(own, tokens)
    assert (gold - parallel)[:, -1].abs().max() > 0.1  # other inputs: other logits


def test_c184_xavier_keeps_the_variance_only_if_fans_are_equal() -> None:
    """Variance gain of a matrix is fan_in·2/(fan_in + fan_out)."""
    model = ct.build(ct.config("transformer-base").replace({"encoder.layers": 1, "decoder.layers": 1}), seed=0)
    block = model.encoder.blocks[0]
    matrices = {"q": block.attn.f.q, "up": block.ffn.f.up, "down": block.ffn.f.down}
    gains = {name: linear.in_features * linear.weight.var().item() for name, linear in matrices.items()}
    assert gains == pytest.approx({"q": 1.0, "up": 0.4, "down": 1.6}, rel=0.01)
    assert (512 * 2 / 2560, 2048 * 2 / 2560) == (0.4, 1.6)


def test_c185_xavier_standard_deviation_is_twice_that_of_gpt2() -> None:
    config = ct.config("transformer-base").replace({"encoder.layers": 1, "decoder.layers": 1})
    stds = []
    for init in (c.XavierInit(), c.NormalInit()):
        stds.append(ct.build(config.replace(init=init), seed=0).encoder.blocks[0].attn.f.q.weight.std().item())
    assert stds == pytest.approx([math.sqrt(2 / (512 + 512)), 0.02], rel=0.01)
    assert stds[0] == pytest.approx(0.044, abs=5e-4)


def test_c187_logit_gradient_is_p_minus_y_and_largest_for_confident_mistakes() -> None:
    logits = torch.randn(5, dtype=torch.float64)
    target, losses, norms = torch.tensor(2), [], []
    for margin in (8.0, 2.0, 0.0, -2.0, -8.0):  # from confident and correct to confident and wrong
        x = (logits + margin * F.one_hot(target, 5)).requires_grad_()
        loss = F.cross_entropy(x, target)
        (grad,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(grad, x.detach().softmax(-1) - F.one_hot(target, 5))
        losses.append(loss.item())
        norms.append(float(grad.norm()))
    assert losses == sorted(losses)
    assert norms == sorted(norms)
    assert norms[-1] < math.sqrt(2)


def test_c188_training_computes_all_positions_in_one_pass_without_a_cache() -> None:
    model, tokens = build_decoder("tiny-llama")
    shapes: list[tuple[int, ...]] = []
    for block in model.decoder.blocks:
        block.attn.f.k.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[:2])))
    mean_loss(model, tokens).backward()
    assert shapes == [(1, 9)] * len(model.decoder.blocks)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model(tokens, cache=model.new_cache(1, 10)).requires_grad  # with a cache there are no gradients


def test_c190_checkpointing_stores_block_inputs_and_recomputes_the_rest() -> None:
    """Equal gradients: tests/model/test_equivalences.py::test_activation_checkpointing_is_bit_exact."""
    model, tokens = build_decoder()
    alive: dict[str, list[bool]] = {}
    stored: list[StorageWeakRef] = []

    def record(module: nn.Module, args: object, out: Tensor) -> None:
        stored.append(StorageWeakRef(out.untyped_storage()))

    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda module, args: record(module, args, args[0]))
        block.ffn.f.up.register_forward_hook(record)
    for mode in ("none", "full"):
        stored.clear()
        loss = mean_loss(model.train().use_activation_checkpointing(mode), tokens)
        alive[mode] = [not reference.expired() for reference in stored]
        num_calls = len(stored)
        loss.backward()
        assert len(stored) == (num_calls if mode == "none" else 2 * num_calls)
    assert alive == {"none": [True, True] * 2, "full": [True, False] * 2}  # block input, FFN hidden


def test_c191_checkpointing_costs_at_most_a_third_more_flops() -> None:
    """A second forward pass is 1 of 3 parts; the head and the last product of each block are not recomputed."""
    size = ct.size("llama-2-7b", mode="train", context=2048)
    without, full = (size.train_flops[mode].total for mode in ("none", "full"))
    assert full / without == pytest.approx(1.257, abs=5e-4)
    assert full - without < size.forward_flops.total
    assert full / without < 4 / 3


def test_c192_activation_memory_is_quadratic_only_without_tiling() -> None:
    """GPT-2 stores b·n bytes and, without tiling, a·n² more, which is the larger term from 681 tokens on."""
    curves = {
        kernel: [
            ct.size("gpt2", mode="train", context=n, kernel=kernel).memory.bytes_by_component["activations"]
            for n in (512, 1024, 2048)
        ]
        for kernel in ("auto", "explicit")
    }
    quadratic = {k: (y[2] - 3 * y[1] + 2 * y[0]) / (6 * 512**2) for k, y in curves.items()}
    linear = {k: (y[1] - y[0]) / 512 - 3 * 512 * quadratic[k] for k, y in curves.items()}
    assert quadratic["auto"] == 0
    assert quadratic["explicit"] > 4 * 12 * 12  # a score in fp32 in each of 12 heads of 12 layers
    assert linear["explicit"] > 10 * 4 * 12 * 768  # ten times the block inputs in fp32: q, k, v, z and FFN hidden
    assert linear["explicit"] / quadratic["explicit"] == pytest.approx(681, abs=1)
