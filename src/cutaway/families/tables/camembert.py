"""CamemBERT: RoBERTa for French. https://arxiv.org/abs/1911.03894"""

from cutaway.families.tables import roberta

FAMILY = roberta.build_family("camembert", "Camembert", 30522)
