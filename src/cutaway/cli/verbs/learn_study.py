"""`cutaway learn study`: stored results of the studies, and the measurements again."""

from pathlib import Path
from typing import Annotated

from cutaway.cli.json_output import print_json
from cutaway.cli.options import JsonFlag, argument, option


def study(
    name: Annotated[str | None, argument("Name of the study; default a list.", show_default=False)] = None,
    run: Annotated[bool, option("Repeat the measurements instead of showing the stored results.", "--run")] = False,
    out: Annotated[
        Path | None,
        option("With --run: write the results to this JSON file. An interrupted run continues.", metavar="FILE"),
    ] = None,
    jobs: Annotated[int, option("With --run: number of processes. Parts that measure time run alone.", min=1)] = 1,
    search: Annotated[
        str | None, option("Show the result with this key, or those whose key contains all words.", metavar="TEXT")
    ] = None,
    show_all: Annotated[bool, option("Show all results instead of a list of what is measured.", "--all")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what a study measures, and its results: means and 95 % confidence intervals over seeds.

    Example: cutaway learn study norm-placement --search post/decoder
    """
    from cutaway.cli.views import study_report
    from cutaway.errors import InputError
    from cutaway.learn.studies import STUDIES, get_study, load_results, write_results

    if name is None:
        if run or show_all or search is not None or out is not None:
            raise InputError("no study is named; pass its name, such as `cutaway learn study norm-placement`")
        rows = [study_report.summarize(study) for study in STUDIES.values()]
        print_json(rows) if as_json else study_report.render_studies(rows)
        return
    selected = get_study(name)
    if not run and (out is not None or jobs > 1):
        raise InputError("--out or --jobs is set without --run; add --run to repeat the measurements")
    if run:
        from cutaway.learn.studies.study_run import run_study

        partial_file = None if out is None else out.with_name(f"{out.name}.partial")
        with study_report.study_progress() as progress:
            results = run_study(selected, progress, partial_file=partial_file, jobs=jobs)
        if out is not None and partial_file is not None:
            write_results(results, out)
            partial_file.unlink(missing_ok=True)
    else:
        results = load_results(name)
    if search is not None:
        results = study_report.select_results(results, search)
    if as_json:
        print_json(study_report.results_to_dict(results))
    elif run or show_all or search is not None:
        study_report.render_results(results)
    else:
        study_report.render_measures(results)
