"""XLM-R (XLM-RoBERTa): RoBERTa for 100 languages. https://arxiv.org/abs/1911.02116"""

from cutaway.families.tables import roberta

FAMILY = roberta.build_family("xlm-roberta", "XLMRoberta", 30522)
