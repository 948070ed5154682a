"""Statements about Transformers from books and papers, each with a verdict, a measured figure and its evidence."""

from cutaway.learn.claims.claim_table import (
    KINDS,
    VERDICTS,
    ClaimRow,
    ClaimTopic,
    claims_of_question,
    fill_figures,
    find_claims,
    get_claim,
    load_claims,
    load_topics,
)

__all__ = [
    "KINDS",
    "VERDICTS",
    "ClaimRow",
    "ClaimTopic",
    "claims_of_question",
    "fill_figures",
    "find_claims",
    "get_claim",
    "load_claims",
    "load_topics",
]
