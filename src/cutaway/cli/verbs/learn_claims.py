"""`cutaway learn claims`: statements about Transformers with verdict, figure and evidence. Does not import torch."""

from typing import Annotated

from cutaway.cli.json_output import print_json
from cutaway.cli.options import JsonFlag, argument, option


def claims(
    query: Annotated[
        list[str] | None, argument("Id (C051), topic (norms) or words; default all.", show_default=False)
    ] = None,
    verdict: Annotated[
        str | None,
        option("holds, 'holds when', 'does not hold', available or 'left out'.", metavar="VERDICT"),
    ] = None,
    kind: Annotated[str | None, option("exact, measured, disputed or feature.", metavar="KIND")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List statements of books and papers on Transformers, each with a verdict, the measured figure and its evidence.

    Example: cutaway learn claims post-norm --verdict "does not hold"
    """
    from cutaway.learn.claims import find_claims

    rows = find_claims(" ".join(query) if query else None, verdict=verdict, kind=kind)
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    from cutaway.cli.views.claim_list import render_claims

    render_claims(rows)
