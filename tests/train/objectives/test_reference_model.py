"""Reference model: the disabled adapter and the frozen copy are the initial model, also after training steps."""

import copy

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.train.objectives.reference_model import ReferenceModel

TOKENS = torch.arange(24).view(2, 12)


def build_model(dropout: float = 0.0) -> Transformer:
    model = ct.build(ct.config("tiny-llama"), seed=3)
    return model.add_adapter({"rank": 4, "dropout": dropout}, seed=1).train()


def train_a_step(model: Transformer) -> None:
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1.0)
    for _ in range(2):
        model(TOKENS).logsumexp(-1).mean().backward()
        optimizer.step()


def logits_of(reference: ReferenceModel, policy: Transformer) -> torch.Tensor:
    with reference.use(policy) as model:
        logits = model(TOKENS)
    assert not logits.requires_grad
    return logits


def test_disabled_adapter_equals_frozen_copy_of_the_base() -> None:
    policy = build_model(dropout=0.5)
    base = ct.build(ct.config("tiny-llama"), seed=3)
    by_adapter, by_copy = ReferenceModel(), ReferenceModel(copy.deepcopy(base))
    before = logits_of(by_adapter, policy)
    with by_adapter.use(policy) as model:
        assert model.active_adapter is None
        assert not model.training
    train_a_step(policy)
    assert torch.equal(logits_of(by_adapter, policy), before)
    assert torch.equal(logits_of(by_copy, policy), before)
    assert torch.equal(base.eval()(TOKENS), before)
    assert policy.training
    assert policy.active_adapter == "default"
    policy.eval()
    assert float((policy(TOKENS) - before).detach().abs().max()) > 1e-3


def test_state_of_the_policy_is_restored_after_an_error() -> None:
    policy = build_model()
    with pytest.raises(InputError, match="integers"), ReferenceModel().use(policy):
        policy(TOKENS.float())
    assert policy.active_adapter == "default"
    assert policy.training


def test_frozen_copy_follows_the_policy_to_its_device_and_precision() -> None:
    policy = ct.build(ct.config("tiny-llama"), seed=3)
    reference = ReferenceModel(copy.deepcopy(policy), "bf16")
    policy.to("meta")
    with reference.use(policy) as model:
        assert model.device == policy.device
    policy = ct.build(ct.config("tiny-llama"), seed=3)
    reference = ReferenceModel(copy.deepcopy(policy), "bf16")
    with reference.use(policy) as model, torch.autocast("cpu", torch.bfloat16):
        assert model.hidden_states(TOKENS).dtype == torch.bfloat16  # type: ignore[operator]
    assert not any(each.requires_grad for each in reference.model.parameters())  # type: ignore[union-attr]
