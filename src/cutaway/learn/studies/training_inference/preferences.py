"""Preference learning: a policy tuned on a reward model, with and without a KL penalty to the base model."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from cutaway.learn.studies.study import Estimate, estimate
from cutaway.learn.studies.train_grid import call_with_weights
from cutaway.learn.studies.training_inference import exposure

BETAS = (0.0, 0.1, 0.3, 1.0)
"""Coefficients of the KL penalty."""
PROMPT_LEN, NUM_TOKENS = 2, 12
NUM_UPDATES, BATCH_SIZE, LR = 150, 32, 1e-3
MEASURED_UPDATES, NUM_MEASURED_TEXTS = (0, 25, 50, 100, 150), 256
GOOD_SYMBOLS = tuple(range(8))
"""The true reward is the number of different good symbols in a text, from 0 to 8."""
NUM_PREFERENCES = 2000


def true_reward(tokens: Tensor) -> Tensor:
    """Reward of continuations (…, T), which preferences are drawn from and which the reward model approximates."""
    return torch.stack([(tokens == symbol).any(-1) for symbol in GOOD_SYMBOLS]).sum(0).float()


def count_symbols(tokens: Tensor, num_symbols: int) -> Tensor:
    """(…, S): counts of each symbol, the features of the reward model."""
    return F.one_hot(tokens, num_symbols).sum(-2).float()


def fit_reward_model(first: Tensor, second: Tensor, prefers_first: Tensor, steps: int = 400) -> Tensor:
    """(members, S): weight of each symbol, fitted to preferences between texts (members, N, S) by Bradley-Terry."""
    weights = torch.zeros(len(first), first.shape[-1], device=first.device, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    for _ in range(steps):
        margins = torch.einsum("mns,ms->mn", first - second, weights)
        loss = F.binary_cross_entropy_with_logits(margins, prefers_first, reduction="none").mean(1).sum()
        optimizer.zero_grad()
        (loss + 1e-3 * weights.square().sum()).backward()
        optimizer.step()
    return weights.detach()


@dataclass
class Policies:
    """Several models of one shape, with weights (members, parameters)."""

    model: nn.Module
    num_symbols: int

    def logits(self, weights: Tensor, tokens: Tensor) -> Tensor:
        """(members, B, T, S): logits of each member on its own tokens (members, B, T)."""
        return vmap(self._logits_of_member)(weights, tokens)

    def _logits_of_member(self, flat: Tensor, tokens: Tensor) -> Tensor:
        return call_with_weights(self.model, flat, tokens)

    @torch.no_grad()
    def sample(self, weights: Tensor, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """`prompts` (members, B, T) and NUM_TOKENS sampled tokens."""
        tokens = prompts
        for _ in range(NUM_TOKENS):
            probs = self.logits(weights, tokens)[:, :, -1].softmax(-1)
            new = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(*tokens.shape[:2], 1)
            tokens = torch.cat([tokens, new], -1)
        return tokens


def measure_preferences(device: str) -> dict[str, Estimate]:
    """True reward, reward of the reward model and KL divergence from the base model, by penalty and updates."""
    trained = exposure.train("pair", exposure.BUDGETS["pair"][-1], device)
    return tune_policies(trained.model, trained.weights, device)


def tune_policies(
    model: nn.Module, base: Tensor, device: str, num_updates: int = NUM_UPDATES, batch_size: int = BATCH_SIZE
) -> dict[str, Estimate]:
    """Tune one policy per base model (seeds, parameters) and penalty. The interval is over the seeds."""
    source, num_seeds = exposure.SOURCES["pair"], len(base)
    policies, generator = Policies(model, source.num_symbols), torch.Generator(device).manual_seed(0)
    prompts = source.sample(4 * NUM_PREFERENCES, PROMPT_LEN, torch.Generator().manual_seed(0)).to(device)
    reward_model, accuracies = _train_reward_model(policies, base, prompts, generator)
    betas = torch.tensor(BETAS, device=device).repeat_interleave(num_seeds)
    reference, reward_weights = base.repeat(len(BETAS), 1), reward_model.repeat(len(BETAS), 1)
    weights = reference.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=LR)
    estimates = {"preference/reward-model-accuracy": estimate(accuracies)}
    for update in range(num_updates + 1):
        if update in (*MEASURED_UPDATES, num_updates):
            tokens = policies.sample(weights, _draw(prompts, len(weights), NUM_MEASURED_TEXTS, generator), generator)
            with torch.no_grad():
                _, measured = _policy_loss(policies, weights, reference, tokens, reward_weights, betas)
            for name, values in measured.items():
                for beta, by_seed in zip(BETAS, values.view(len(BETAS), num_seeds).tolist(), strict=True):
                    estimates[f"preference/{name}/{beta:g}/{update}"] = estimate(by_seed)
        tokens = policies.sample(weights, _draw(prompts, len(weights), batch_size, generator), generator)
        loss, _ = _policy_loss(policies, weights, reference, tokens, reward_weights, betas)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return estimates


def _draw(prompts: Tensor, members: int, count: int, generator: torch.Generator) -> Tensor:
    """(members, count, PROMPT_LEN): random prompts."""
    return prompts[torch.randint(len(prompts), (members, count), generator=generator, device=prompts.device)]


def _train_reward_model(
    policies: Policies, base: Tensor, prompts: Tensor, generator: torch.Generator
) -> tuple[Tensor, list[float]]:
    """Fit a reward model to preferences between texts of each base model.

    Return its weights, and its agreement with the true reward on new texts, of pairs whose true rewards differ.
    """
    halves = prompts.view(2, 2 * NUM_PREFERENCES, PROMPT_LEN)
    texts = [policies.sample(base, half.expand(len(base), -1, -1), generator)[..., PROMPT_LEN:] for half in halves]
    counts, rewards = (
        [f(text) for text in texts] for f in (lambda x: count_symbols(x, policies.num_symbols), true_reward)
    )
    is_train = slice(0, NUM_PREFERENCES)
    margins = rewards[0] - rewards[1]
    prefers_first = torch.bernoulli(torch.sigmoid(margins), generator=generator)
    weights = fit_reward_model(counts[0][:, is_train], counts[1][:, is_train], prefers_first[:, is_train])
    predicted = torch.einsum("mns,ms->mn", counts[0] - counts[1], weights)[:, NUM_PREFERENCES:]
    margins = margins[:, NUM_PREFERENCES:]
    correct = ((predicted > 0) == (margins > 0)) & (margins != 0)
    return weights, (correct.sum(1) / (margins != 0).sum(1)).tolist()


def _policy_loss(
    policies: Policies, weights: Tensor, reference: Tensor, tokens: Tensor, reward_weights: Tensor, betas: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with the mean reward as baseline. The reward is that of the reward model minus beta · log-ratio."""
    steps = slice(PROMPT_LEN - 1, -1)
    written, text = tokens[:, :, PROMPT_LEN:, None], tokens[:, :, PROMPT_LEN:]
    logprobs = policies.logits(weights, tokens)[:, :, steps].log_softmax(-1)
    with torch.no_grad():
        reference_logprobs = policies.logits(reference, tokens)[:, :, steps].log_softmax(-1)
        kl = (logprobs.exp() * (logprobs - reference_logprobs)).sum(-1).sum(-1)  # exact in each step
        ratio = (logprobs - reference_logprobs).gather(-1, written).sum((-1, -2))
        proxy = torch.einsum("mbs,ms->mb", count_symbols(text, policies.num_symbols), reward_weights)
        rewards = proxy - betas[:, None] * ratio
        advantages = rewards - rewards.mean(1, keepdim=True)
    loss = -(advantages * logprobs.gather(-1, written).sum((-1, -2))).mean(1).sum()
    measured = {"true-reward": true_reward(text), "proxy-reward": proxy, "kl": kl}
    return loss, {name: values.mean(1) for name, values in measured.items()}
