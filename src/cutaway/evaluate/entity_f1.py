"""Entity-level F1 of tag sequences in the IOB2, IOB1, IOE and IOBES schemes, as seqeval computes it by default."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutaway.evaluate.classification_metrics import ClassScores, class_scores
from cutaway.generate.entity_tags import find_entities


@dataclass(frozen=True)
class EntityResult:
    """Right, predicted and true entities by type."""

    hits: Counter[str]
    predicted: Counter[str]
    true: Counter[str]

    @property
    def overall(self) -> ClassScores:
        """Scores over all entities (micro average)."""
        return class_scores(self.hits.total(), self.predicted.total(), self.true.total())

    @property
    def per_type(self) -> dict[str, ClassScores]:
        types = sorted(self.true.keys() | self.predicted.keys())
        return {type_: class_scores(self.hits[type_], self.predicted[type_], self.true[type_]) for type_ in types}

    def to_dict(self) -> dict[str, Any]:
        overall = self.overall
        return {
            "entity_precision": overall.precision,
            "entity_recall": overall.recall,
            "entity_f1": overall.f1,
            "num_entities": overall.support,
            "per_entity_type": {name: scores._asdict() for name, scores in self.per_type.items()},
        }


def entity_result(predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> EntityResult:
    """Compare the entities of predicted and true tags. An entity is right if its type and all its words are."""
    counts: tuple[Counter[str], Counter[str], Counter[str]] = (Counter(), Counter(), Counter())
    for predicted_tags, true_tags in zip(predicted, true, strict=True):
        found, expected = (set(find_entities(tags)) for tags in (predicted_tags, true_tags))
        for counter, entities in zip(counts, (found & expected, found, expected), strict=True):
            counter.update(entity.type for entity in entities)
    return EntityResult(*counts)
