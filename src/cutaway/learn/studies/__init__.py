"""Studies of statements about Transformers: measurements over seeds, stored with the package."""

from cutaway.learn.studies.study import (
    STUDIES,
    Estimate,
    Study,
    StudyResults,
    estimate,
    get_study,
    load_results,
    read_results,
    write_results,
)

__all__ = [
    "STUDIES",
    "Estimate",
    "Study",
    "StudyResults",
    "estimate",
    "get_study",
    "load_results",
    "read_results",
    "write_results",
]
