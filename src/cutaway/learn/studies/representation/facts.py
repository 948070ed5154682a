"""Where facts are stored: models trained on synthetic facts (subject, relation → object), and neurons of tiny-python.

A text is `subject relation object`, and the object is random for each subject and relation. Only attention moves
information between tokens, so without attention the last token has no information on the subject.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.learn.studies.representation.python_texts import MODULES, load_model, load_module_text
from cutaway.learn.studies.representation.stacked_weights import ffn_output_weights, logit_directions
from cutaway.learn.studies.study import Estimate, estimate, estimate_share
from cutaway.learn.studies.train_grid import TrainingGrid, train_grid
from cutaway.lens.edit import EditSpec, edit
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

NUM_SUBJECTS, NUM_RELATIONS, NUM_OBJECTS = 64, 6, 32
VOCAB = NUM_SUBJECTS + NUM_RELATIONS + NUM_OBJECTS
D_MODEL, HEADS, LAYERS = 32, 4, 2
LAYERS_WITHOUT_FFN = 3 * LAYERS
"""An FFN of 4·d_model has twice the parameters of attention, so this depth has the same number without FFNs."""
GRID = TrainingGrid(lrs=(5e-3,), warmups=(50,), num_seeds=10, steps=600, batch_size=128, seq_len=3)
SUBJECT, RELATION = 0, 1
"""Token positions. The object is predicted at the relation."""
NUM_ABLATED_NEURONS = 8
NO_FFN: Mapping[str, str] = {"blocks.*.ffn.out": "zero"}
"""Edits of a model without FFNs, in training and in evaluation. The FFNs have one neuron, to save time."""


@dataclass(frozen=True)
class FactTable:
    """Random facts. The first draw of a generator is the table, so that a seed has one table."""

    def table(self, generator: torch.Generator) -> Tensor:
        """(subjects, relations): object of each fact."""
        return torch.randint(NUM_OBJECTS, (NUM_SUBJECTS, NUM_RELATIONS), generator=generator)

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """(count, length): `subject relation object`."""
        table = self.table(generator)
        subjects = torch.randint(NUM_SUBJECTS, (count,), generator=generator)
        relations = torch.randint(NUM_RELATIONS, (count,), generator=generator)
        return _encode(subjects, relations, table[subjects, relations])[:, :length]

    def all_facts(self, seed: int) -> Tensor:
        """(facts, 3): all facts of a seed."""
        table = self.table(torch.Generator().manual_seed(seed))
        subjects, relations = torch.cartesian_prod(torch.arange(NUM_SUBJECTS), torch.arange(NUM_RELATIONS)).T
        return _encode(subjects, relations, table[subjects, relations])


def _encode(subjects: Tensor, relations: Tensor, objects: Tensor) -> Tensor:
    first_object = NUM_SUBJECTS + NUM_RELATIONS
    return torch.stack([subjects, NUM_SUBJECTS + relations, first_object + objects], -1)


def fact_config(layers: int, hidden: int = 4 * D_MODEL) -> Config:
    stack = {
        "layers": layers,
        "block": {
            "attention": {"heads": HEADS, "position": {"kind": "rope"}},
            "ffn": {"kind": "mlp", "activation": "relu", "hidden": hidden},
        },
    }
    return read_config({"form": "decoder", "vocab_size": VOCAB, "d_model": D_MODEL, "decoder": stack})


def object_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of the object."""
    return F.cross_entropy(logits[:, RELATION], tokens[:, -1])


@dataclass(frozen=True)
class FactModel:
    """A trained model and its facts, (facts, 3)."""

    model: Transformer
    facts: Tensor

    @torch.no_grad()
    def predict(self, edits: Mapping[str, EditSpec] | None = None, facts: Tensor | None = None) -> Tensor:
        """(facts,): predicted tokens at the relation."""
        tokens = (self.facts if facts is None else facts)[:, :2]
        if not edits:
            return self.model(tokens)[:, RELATION].argmax(-1)
        with edit(self.model, edits):
            return self.model(tokens)[:, RELATION].argmax(-1)

    def accuracy(self, edits: Mapping[str, EditSpec] | None = None) -> float:
        return float((self.predict(edits) == self.facts[:, -1]).float().mean())

    def record(self, pattern: str, facts: Tensor) -> dict[str, Tensor]:
        with torch.no_grad(), trace(self.model, pattern) as t:
            self.model(facts[:, :2])
        return {name: t[name].as_subclass(Tensor) for name in t}


def measure_facts(device: str, grid: TrainingGrid = GRID) -> dict[str, Estimate]:
    """Accuracy on memorized facts, with and without FFNs, after ablations and after patches, over seeds."""
    rows: dict[str, list[float]] = {}
    variants = {"full": (fact_config(LAYERS), None), "attention-only": (fact_config(LAYERS_WITHOUT_FFN, 1), NO_FFN)}
    for variant, (config, edits) in variants.items():

        def build_model(seed: int, config: Config = config) -> Transformer:
            return build(config, seed=seed)

        trained = train_grid(build_model, FactTable(), grid, loss=object_loss, edits=edits, device=device)
        for index, (_, _, seed) in enumerate(grid.members):
            model = trained.load_member(index)
            assert isinstance(model, Transformer)
            fact_model = FactModel(model.eval(), FactTable().all_facts(seed).to(device))
            row = {f"accuracy/{variant}": fact_model.accuracy(edits)}
            if variant == "full":
                row |= ablate_sublayers(fact_model) | patch_sublayers(fact_model, seed)
                row |= ablate_neurons(fact_model, seed)
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
    return {f"facts/{key}": estimate(values) for key, values in rows.items()}


def ablate_sublayers(fact_model: FactModel) -> dict[str, float]:
    """Accuracy with a sublayer, or all of one kind, replaced by its mean over all facts (by position)."""

    def mean_ablate(value: Tensor) -> Tensor:
        return value.mean(0, keepdim=True).expand_as(value)

    names = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("attn", "ffn")]
    row = {f"ablated/{name}": fact_model.accuracy({f"blocks.{name}.out": mean_ablate}) for name in names}
    for kind in ("attn", "ffn"):
        row[f"ablated/{kind}"] = fact_model.accuracy({f"blocks.*.{kind}.out": mean_ablate})
    return row


def patch_sublayers(fact_model: FactModel, seed: int) -> dict[str, float]:
    """Share of facts whose object is restored by outputs of the clean run, in a run on another subject.

    The outputs of all attention or of all FFN sublayers are patched at the subject or at the relation.
    """
    order = torch.randperm(NUM_SUBJECTS, generator=torch.Generator().manual_seed(seed)).to(fact_model.facts.device)
    corrupted = fact_model.facts.clone()
    corrupted[:, SUBJECT] = order[corrupted[:, SUBJECT]]
    answers = fact_model.facts[:, -1]
    # A fact counts if the model knows it and if the other subject has another object.
    counts = (fact_model.predict() == answers) & (fact_model.predict(facts=corrupted) != answers)
    row = {}
    for kind in ("attn", "ffn"):
        clean = fact_model.record(f"{kind}.out", fact_model.facts)
        for position, label in ((SUBJECT, "subject"), (RELATION, "relation")):
            edits = {name: _patch_position(value, position) for name, value in clean.items()}
            restored = fact_model.predict(edits, corrupted) == answers
            row[f"restored/{kind}/{label}"] = float(restored[counts].float().mean())
    return row


def _patch_position(clean: Tensor, position: int) -> Callable[[Tensor], Tensor]:
    def patch(value: Tensor) -> Tensor:
        value[:, position] = clean[:, position]
        return value

    return patch


def ablate_neurons(fact_model: FactModel, seed: int) -> dict[str, float]:
    """Accuracy with the neurons zeroed that add most to a fact's object: on that fact and on others.

    `own`: the 8 neurons with the largest contribution to the object's logit. `other`: the neurons of another fact.
    `random`: random neurons.
    """
    model, facts = fact_model.model, fact_model.facts
    activations = torch.stack([*fact_model.record("ffn.hidden", facts).values()])[:, :, RELATION]  # (L, facts, h)
    directions = logit_directions(model)[facts[:, -1]]  # (facts, d)
    contributions = activations * torch.einsum("ldh,fd->lfh", ffn_output_weights(model), directions)
    flat = contributions.transpose(0, 1).flatten(1)  # (facts, L·h)
    own = flat.topk(NUM_ABLATED_NEURONS).indices
    generator = torch.Generator().manual_seed(seed)
    other = own[torch.randperm(len(own), generator=generator).to(own.device)]
    random = torch.rand(flat.shape, generator=generator).topk(NUM_ABLATED_NEURONS).indices.to(own.device)
    known = fact_model.predict() == facts[:, -1]
    row = {}
    for name, neurons in (("own", own), ("other", other), ("random", random)):
        mask = torch.ones_like(flat).scatter_(1, neurons, 0).view(len(flat), LAYERS, -1)
        edits = {f"blocks.{layer}.ffn.hidden": _mask_position(mask[:, layer]) for layer in range(LAYERS)}
        row[f"neurons/{name}"] = float((fact_model.predict(edits) == facts[:, -1])[known].float().mean())
    return row


def _mask_position(mask: Tensor) -> Callable[[Tensor], Tensor]:
    def apply(value: Tensor) -> Tensor:
        value[:, RELATION] *= mask
        return value

    return apply


TOP_POSITIONS, TOP_TOKENS, NUM_MODULES = 16, 10, 10


@torch.no_grad()
def measure_neuron_memory(device: str, num_modules: int = NUM_MODULES) -> dict[str, Estimate]:
    """Neurons of tiny-python as keys and values, by block.

    `same-token`: share of neurons whose 16 strongest activations have the same token in at least half of the positions.
    `agreement`: share of neurons of which one of the 10 tokens that the output weights raise most is the next token
    at one of these positions. `random`: the same for positions of another neuron.
    """
    checkpoint = load_model(device)
    model = checkpoint.model
    ids = torch.cat([load_module_text(name, 4).ids for name in MODULES[:num_modules]]).to(device)
    with trace(model, "ffn.hidden") as t:
        model(ids)
    current, following = ids[:, :-1].flatten(), ids[:, 1:].flatten()
    estimates = {}
    for layer, down in enumerate(ffn_output_weights(model)):
        hidden = t[f"blocks.{layer}.ffn.hidden"].as_subclass(Tensor)[:, :-1].flatten(0, 1)  # (tokens, h)
        positions = hidden.topk(TOP_POSITIONS, 0).indices.T  # (h, 16)
        raised = (logit_directions(model) @ down).topk(TOP_TOKENS, 0).indices.T  # (h, 10)
        tokens = current[positions]
        most_frequent = (tokens[:, :, None] == tokens[:, None]).sum(-1).amax(-1)
        values = {
            "same-token": (most_frequent >= TOP_POSITIONS / 2).float(),
            "agreement": _agreement(following[positions], raised),
            "agreement-random": _agreement(following[positions.roll(1, 0)], raised),
        }
        for name, flags in values.items():
            estimates[f"neurons/{name}/{layer}"] = estimate_share(flags.tolist())
    return estimates


def _agreement(next_tokens: Tensor, raised: Tensor) -> Tensor:
    """(neurons,): whether any of the next tokens, (neurons, 16), is among the raised tokens, (neurons, 10)."""
    return (next_tokens[:, :, None] == raised[:, None]).any(-1).any(-1).float()
