"""End-to-end tests of the web page in Chromium: the page shows the values of the library."""

import json
import math
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import nightly_except
from support.server import serve_in_thread
from torch import Tensor

import cutaway as ct
from cutaway.check import get_checks
from cutaway.cli.verbs.open import export_page, load_catalog
from cutaway.config import to_dict
from cutaway.lens import follow_token
from cutaway.lens.analysis import ablation, head_scores
from cutaway.lens.analysis.attention_heads import HEAD_TYPES
from cutaway.pretrained import list_pretrained, load_examples
from cutaway.serve import static_files
from cutaway.serve.app import build_app
from cutaway.serve.inspect import routes
from cutaway.serve.inspect.exercise_access import ExerciseAccess
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.serve.inspect.interval_conclusions import conclude_variant_difference
from cutaway.serve.inspect.queries import activation_patching
from cutaway.serve.inspect.queries.ablation_results import load_ablation_results
from cutaway.serve.inspect.queries.activation_patching import ActivationPatching
from cutaway.serve.inspect.queries.attention import HEAD_TYPE_BATCH_SIZE
from cutaway.serve.inspect.queries.base import interval_bounds
from cutaway.serve.inspect.queries.trained_variants import BASE, VARIANTS, load_variant_results
from cutaway.serve.notebook_pages import build_notebook_router
from cutaway.serve.server import bind_socket, build_access_policy
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.saved_models import SavedModel, list_saved_models, load_saved_model
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, train

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from hatch_build import find_node_and_npm  # noqa: E402

pytestmark = pytest.mark.unchecked
TEXT = "Lily had a ball.\nThe cat sat on the"
COPIED = [
    "Lily met Max. Lily said hi to",
    "Max was sad. Lily met Max. Lily said hi to",
    "Once upon a",
    "Once upon a time, there was",
]
LONG = "Lily had a red ball. She played with it in the park, and her dog ran after it.\n" * 25


@contextmanager
def serve_page(model: str | Inspector, exercise_access: ExerciseAccess | None = None) -> Iterator[str]:
    """URL of a server with a pretrained model or an inspector."""
    assert shutil.which("chromium"), "this test needs Chromium; install Debian's chromium package"
    inspector = load_catalog(model, None, "cpu", None, quiet=True).current if isinstance(model, str) else model
    executor = routes.QueryExecutor(inspector, exercise_access)
    access_policy = build_access_policy("127.0.0.1", None)
    app = build_app(
        [routes.build_router(executor), build_notebook_router(), static_files.build_static_router()],
        access_policy=access_policy,
        on_shutdown=[executor.close],
    )
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as url:
        yield f"{url}/"


@pytest.fixture(scope="module")
def exercise_access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExerciseAccess]:
    """Exercises in a temporary directory, with progress in another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTAWAY_HOME", str(tmp_path_factory.mktemp("state")))
        yield ExerciseAccess("", directory=tmp_path_factory.mktemp("exercises"))


@pytest.fixture(scope="module")
def page(exercise_access: ExerciseAccess) -> Iterator[str]:
    with serve_page("tiny-english", exercise_access) as url:
        yield url


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Expected values, computed with the library."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    export_page(file, "tiny-english", TEXT, "cpu", None, as_json=True)
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    assert tokenizer is not None
    token_ids = tokenizer.encode(TEXT)
    tokens = torch.tensor([token_ids])
    journey = follow_token(model, tokens)
    names = ("embed", "resid_mid", "resid_post", "final_norm")
    stages = [stage for stage in journey.stages if stage.site.endswith(names)]
    rng = random.Random(0)
    values = []
    for site in ("embed", "blocks.2.attn.in", "blocks.0.attn.q", "blocks.3.attn.pattern", "blocks.5.ffn.hidden"):
        position, index = rng.randrange(1, len(token_ids)), rng.randrange(8)
        with torch.no_grad(), ct.trace(model, site) as t:
            model(tokens)
        activation = t[site][0, :, position] if site.endswith("pattern") else t[site][0, position]
        index = min(index, activation.shape[-1] - 1, position)
        values.append(
            {
                "site": site,
                "position": position,
                "index": index,
                "value": format_number(float(activation.reshape(-1)[index])),
            }
        )
    worked = work_out_attention(model, tokens, "blocks.3.attn", head=2, position=len(token_ids) - 2, key=3)
    edits: dict[str, Any] = {"blocks.1": "swap", "blocks.2.attn.z": {"do": "zero", "heads": [1, 3]}}
    original, edited = ablation(model, token_ids, {"it": edits}, progress=False).values.tolist()
    block_configs = model.config.stacks["decoder"].blocks
    long = tokenizer.encode(LONG)[:512]
    text = tokenizer.decode(long)
    return {
        "file": str(file),
        "text": TEXT,
        "points": [
            {
                "norm": format_number(stage.norm),
                "top_token": show_whitespace(tokenizer.decode([stage.top_tokens[0][0]])),
            }
            for stage in stages
        ],
        "next_tokens": [
            f"{show_whitespace(tokenizer.decode([token]))} {format_percent(probability)}"
            for token, probability in journey.top_tokens
        ],
        "values": values,
        "token_strs": [show_whitespace(tokenizer.decode([token])) for token in token_ids],
        "worked": worked,
        "head_types": list_head_types(checkpoint),
        "final_rms": format_number(stages[-2].norm / model.config.d_model**0.5),
        "edited": {
            "edits": "blocks.1:swap,blocks.2.attn.z:zero@1.3",
            "values": [
                f"{format_number(original[0])} → {format_number(edited[0])}",
                format_number(edited[1]),
                format_percent(edited[2]),
            ],
            "unmasked": describe_unmasked_losses(),
        },
        "variants": conclude_on_variants(),
        "architecture": {
            "d_model": model.config.d_model,
            "vocab_size": model.config.vocab_size,
            "layers": len(block_configs),
            "heads": block_configs[0].attention.heads,
            "hidden": block_configs[0].ffn.hidden_dim(model.config.d_model),
        },
        "long": text,
        "example": next(item for item in load_examples("tiny-english") if item["fragment"]["screen"] == "edit"),
        "copied": [copied_facts(checkpoint, text) for text in COPIED],
        "compare": compare_facts(model, tokenizer),
        "long_tokens": len(tokenizer.encode(text)),
        "longest_task": 200,  # milliseconds of CPU time
    }


def copied_facts(checkpoint: Any, text: str) -> dict[str, str]:
    """A text, and the sentence about the occurrences of its predicted token, which are masked jointly."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    token_ids = tokenizer.encode(text)
    tokens, strs = torch.tensor([token_ids]), [tokenizer.decode([token]) for token in token_ids]

    def mask(scores: Tensor) -> Tensor:
        scores[:, :, -1, positions] = -torch.inf
        return scores

    with torch.no_grad():
        answer = int(model(tokens)[0, -1].argmax())
        answer_str = tokenizer.decode([answer])
        positions = [index for index, string in enumerate(strs) if string.strip() == answer_str.strip()]
        with ct.edit(model, {"blocks.*.attn.scores": mask}):
            probabilities = model(tokens)[0, -1].softmax(-1)
    if not positions:
        return {"text": text, "sentence": f"“{show_whitespace(answer_str)}” does not occur in the text"}
    quoted = [f"“{show_whitespace(string)}”" for string in (strs[positions[0]], answer_str)]
    place = f"token{'s' if len(positions) > 1 else ''} {', '.join(map(str, positions))}"
    them = "them" if len(positions) > 1 else "it"
    new, probability = int(probabilities.argmax()), format_percent(float(probabilities[answer]))
    if new == answer:
        sentence = (
            f"is not copied by direct attention to the same token: without attention to {them}, {quoted[1]} still"
        )
        return {"text": text, "sentence": f"It occurs in the text ({place}), but {sentence} has {probability}."}
    effect = f"the prediction is “{show_whitespace(tokenizer.decode([new]))}” and {quoted[1]} has {probability}"
    return {
        "text": text,
        "sentence": f"It is mostly copied from {quoted[0]} ({place}): without attention to {them}, {effect}.",
    }


def compare_facts(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Values of the first pair of the screen Compare with a name, and of one patch in both directions."""
    examples = [item for item in load_examples("tiny-english") if item["fragment"]["screen"] == "compare"]
    example = next(item for item in examples if item["title"] == "Pronoun")
    texts = {run: example["fragment"][key] for run, key in (("clean", "text"), ("changed", "changed"))}
    inputs = {run: torch.tensor([tokenizer.encode(text)]) for run, text in texts.items()}
    site, position = "blocks.4.resid_pre", 1
    values, logits = {}, {}
    for run, tokens in inputs.items():
        with torch.no_grad(), ct.trace(model, site) as t:
            logits[run] = model(tokens)[0, -1]
        values[run] = t[site].as_subclass(Tensor)[:, [position]]
    answers = [int(logits[run].argmax()) for run in ("clean", "changed")]
    differences = {run: float(own[answers[0]] - own[answers[1]]) for run, own in logits.items()}
    shares = {}
    for direction, donor, receiver in (("forward", "clean", "changed"), ("reverse", "changed", "clean")):
        edits = {site: {"do": "replace", "value": values[donor], "positions": [position]}}
        with torch.no_grad(), ct.edit(model, edits):
            patched = model(inputs[receiver])[0, -1]
        patched_difference = float(patched[answers[0]] - patched[answers[1]])
        share = (patched_difference - differences[receiver]) / (differences[donor] - differences[receiver])
        shares[direction] = {"share": f"{100 * share:.1f} %", "difference": format_number(patched_difference)}
    same = ("The girl was", "The king was")
    runs = {run: torch.tensor([tokenizer.encode(text)]) for run, text in zip(texts, same, strict=True)}
    metrics = [describe_metric(model, tokenizer, runs, chosen) for chosen in ([" very"], [" happy", " sad"])]
    return {
        "title": example["title"],
        "texts": texts,
        "same": {"texts": same, "metrics": metrics, "typed": ["happy", "sad"]},
        "answers": [show_whitespace(tokenizer.decode([answer])) for answer in answers],
        "differences": [format_number(differences[run]) for run in ("clean", "changed")],
        "position": position,
        "row": 4,
        "patches": shares,
        "summary": summarize_sufficient_patches(model, tokenizer, inputs, answers),
    }


def describe_metric(model: Any, tokenizer: Any, inputs: dict[str, Tensor], texts: list[str]) -> dict[str, str]:
    """Name of the metric of one or two tokens, its values in both runs, and the sentence on sufficient patches."""
    tokens = [tokenizer.encode(text)[-1] for text in texts]
    with torch.no_grad():
        values = {run: measure_metric(model(own)[0, -1], tokens) for run, own in inputs.items()}
    shown = {
        run: format_number(value)
        if len(tokens) == 2
        else f"{format_number(value)} nats ({format_percent(math.exp(value))})"
        for run, value in values.items()
    }
    summary = summarize_sufficient_patches(model, tokenizer, inputs, tokens)
    return {"name": name_metric(tokenizer, tokens), **shown, "summary": summary}


def measure_metric(logits: Tensor, tokens: list[int]) -> float:
    """Log-probability of one token, or logit difference between two."""
    if len(tokens) == 1:
        return float(logits.log_softmax(-1)[tokens[0]])
    return float(logits[tokens[0]] - logits[tokens[1]])


def name_metric(tokenizer: Any, tokens: list[int]) -> str:
    names = [f"“{show_whitespace(tokenizer.decode([token]))}”" for token in tokens]
    return f"log-probability of {names[0]}" if len(names) == 1 else f"logit difference {names[0]} − {names[1]}"


def summarize_sufficient_patches(model: Any, tokenizer: Any, inputs: dict[str, Tensor], answers: list[int]) -> str:
    """The sentence on the tokens and layers whose residual stream alone restores 90 % of the change of the metric."""
    num_layers = len(model.config.stacks["decoder"].blocks)
    sites = [*(f"blocks.{block}.resid_pre" for block in range(num_layers)), f"blocks.{num_layers - 1}.resid_post"]
    layers = ["embedding", *(f"after block {block}" for block in range(num_layers))]
    with torch.no_grad(), ct.trace(model, *sites) as t:
        clean = model(inputs["clean"])[0, -1]
    values = {site: t[site].as_subclass(Tensor) for site in sites}
    with torch.no_grad():
        changed = model(inputs["changed"])[0, -1]
    start, end = (measure_metric(logits, answers) for logits in (changed, clean))
    terms = []
    for position, (own, other) in enumerate(zip(*(tokens[0].tolist() for tokens in inputs.values()), strict=True)):
        shares = []
        for site in sites:
            edits = {site: {"do": "replace", "value": values[site][:, [position]], "positions": [position]}}
            with torch.no_grad(), ct.edit(model, edits):
                logits = model(inputs["changed"])[0, -1]
            shares.append((measure_metric(logits, answers) - start) / (end - start))
        rows = [row for row, share in enumerate(shares) if share >= 0.9]
        if not rows:
            continue
        assert rows == list(range(rows[0], rows[-1] + 1))
        names = [show_whitespace(tokenizer.decode([token])) for token in dict.fromkeys((own, other))]
        low, high = (f"{100 * bound(shares[row] for row in rows):.0f}" for bound in (min, max))
        layer_range = " to ".join(dict.fromkeys((layers[rows[0]], layers[rows[-1]])))
        terms.append((rows[0], f"{'|'.join(names)}, {layer_range} ({' to '.join(dict.fromkeys((low, high)))} %)"))
    name = name_metric(tokenizer, answers)
    sufficient = "; ".join(term for _, term in sorted(terms))
    return f"Enough alone (at least 90 % of the change of the {name}): {sufficient}."


def conclude_on_variants() -> dict[str, dict[str, str]]:
    """Summary and conclusion by variant, from the losses of the seeds."""
    losses = {name: results["loss"] for name, results in load_variant_results()["variants"].items()}
    conclusions = {}
    for variant in VARIANTS:
        if variant.name != BASE:
            differences = [own - base for own, base in zip(losses[variant.name], losses[BASE], strict=True)]
            conclusions[variant.label] = conclude_variant_difference(interval_bounds(differences))
    return {label: {"summary": item.summary, "conclusion": item.conclusion} for label, item in conclusions.items()}


def describe_unmasked_losses() -> str:
    """Losses of the model that was trained without a mask, without and with the mask, as the page words them."""
    means = {
        row["condition"]: row["mean"]
        for row in load_ablation_results()["measurements"]
        if row["metric"] == "loss" and row["variant"] == "no mask"
    }
    return (
        f"the loss without the mask is {format_number(means['baseline'])}, because every token attends to the one to "
        f"predict; the same model measured with the mask: {means['with the mask']:.1f}"
    )


def work_out_attention(model: Any, tokens: Tensor, name: str, *, head: int, position: int, key: int) -> dict[str, Any]:
    """Numbers of the worked example of one head, query and key, from the activations at the sites."""
    with torch.no_grad(), ct.trace(model, *(f"{name}.{site}" for site in ("q", "k", "scores", "pattern", "z"))) as t:
        model(tokens)
    pattern = t[f"{name}.pattern"][0, head, position]
    return {
        "attention": name,
        "head": head,
        "position": position,
        "key": key,
        "dot": format_significant(float(t[f"{name}.q"][0, position, head] @ t[f"{name}.k"][0, key, head])),
        "score": format_significant(float(t[f"{name}.scores"][0, head, position, key])),
        "weight": format_percent(float(pattern[key])),
        "z_norm": format_number(float(t[f"{name}.z"][0, position, head].norm())),
    }


def list_head_types(checkpoint: Any) -> list[dict[str, Any]]:
    """Head types with the heads whose highest score is of this type, as the page lists them."""
    scores = head_scores(checkpoint, batch_size=HEAD_TYPE_BATCH_SIZE)
    rows = []
    for number, name in enumerate(HEAD_TYPES):
        best = scores.values.argmax(-1) == number
        heads = [
            (float(scores.values[block, head, number]), int(block), int(head))
            for block, head in best.nonzero().tolist()
            if scores.values[block, head, number] >= 0.4
        ]
        shown = [
            {"block": block, "head": head, "score": format_percent(score)}
            for score, block, head in sorted(heads, key=lambda item: -item[0])
        ]
        if shown:
            terms = [f"{item['block']}.{item['head']} {item['score']}" for item in shown[:6]]
            terms += [f"and {len(shown) - 6} more"] if len(shown) > 6 else []
            rows.append({"type": name.replace("_", " "), "heads": shown, "text": " ".join(terms)})
    return rows


def format_significant(value: float, digits: int = 4) -> str:
    """Format a number with significant digits like the web page."""
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}".replace("-", "−")


def format_number(value: float) -> str:
    """Format a number like the web page."""
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e6):
        mantissa, _, power = f"{value:.1e}".partition("e")
        text = f"{mantissa}e{int(power):+d}"
    else:
        text = f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"
    return text.replace("-", "−")


def format_percent(fraction: float) -> str:
    return "<0.1 %" if 0 < fraction < 0.001 else f"{100 * fraction:.1f} %"


def show_whitespace(text: str) -> str:
    shown = text.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")
    if not shown.strip():
        return shown.replace(" ", "·") or "∅"
    left, right = len(shown) - len(shown.lstrip(" ")), len(shown) - len(shown.rstrip(" "))
    return "·" * left + shown.strip(" ") + "·" * right


SCREENS = ["model", "trace", "attention", "generate", "edit", "compare", "training", "size", "check", "learn"]


PAGE_TESTS = [*SCREENS, "long-text", "exported-file", "notebook", "accessibility"]


@pytest.mark.parametrize("name", nightly_except(("model", "trace"), PAGE_TESTS))
def test_web_page(name: str, page: str, facts: dict[str, Any], tmp_path: Path, exercise_access: ExerciseAccess) -> None:
    if name == "check":
        facts = {**facts, "checks": run_checks()}
    if name == "learn":
        facts = {**facts, "exercise_token": exercise_access.token}
    if name == "training":
        with serve_runs(tmp_path) as run_facts:
            run_in_browser(name, page, facts | run_facts, tmp_path)
        return
    if name != "long-text":
        run_in_browser(name, page, facts, tmp_path)
        return
    config = ct.config({**to_dict(ct.config("tiny-llama")), "context": 1024})
    with serve_page(build_inspector(ct.build(config, seed=0), name="tiny-llama")) as url:
        text = ("one token per byte of this text. " * 40)[:999]
        thousand = f"{text[:500]}Z{text[500:]}"
        run_in_browser(name, page, {**facts, "thousand_url": url, "thousand": thousand}, tmp_path)


def run_checks() -> list[dict[str, str]]:
    """Titles and verdicts of all checks of the model that the page opens."""
    report = ct.check(ct.load("tiny-english", dtype=torch.float32).model, budget=240)
    return [{"title": get_checks()[item.check].title, "verdict": item.verdict} for item in report.findings]


@contextmanager
def serve_runs(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Facts about two runs: one before its first step, and one that trains while the page is open."""
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    recipe: dict[str, Any] = {
        "model": {
            "form": "decoder", "vocab_size": 259, "d_model": 16, "context": 32,
            "decoder": {"layers": 2, "block": {"attention": {"heads": 2}}},
        },
        "data": {"seq_len": 16, "sources": [{"path": str(text)}], "validation_split": 0.2},
        "training": {"max_steps": 40, "batch_size": 2, "preflight": False},
        "eval": {"interval": 10, "num_sequences": 2, "sample_prompt": "to be or not"},
        "checkpoint": {"interval": 20, "num_snapshots": 3},
    }  # fmt: skip
    callback = Callback(on_step_end=lambda row, timing: time.sleep(0.5))
    live = prepare_trainer(load_recipe(recipe), tmp_path / "live", device="cpu", callback=callback)
    overrides = ["training.max_steps=6"]
    unstarted = prepare_trainer(load_recipe(recipe, overrides), tmp_path / "unstarted", device="cpu")
    unstarted.lock.release()
    reference = train(load_recipe(recipe), tmp_path / "reference", device="cpu")  # training is deterministic
    expected = {saved.step: measure_loss(reference, saved, "to be or not") for saved in list_saved_models(reference)}
    thread = threading.Thread(target=live.train)
    with ExitStack() as stack:
        runs = {"unstarted": unstarted.run_directory.directory, "live": live.run_directory.directory}
        urls = {name: stack.enter_context(serve_page(str(path))) for name, path in runs.items()}
        thread.start()
        stack.callback(thread.join)
        stack.callback(live.stop_requested.set)
        yield {"models": urls, "steps": list(expected), "losses": list(expected.values())}


def measure_loss(run: RunDirectory, saved: SavedModel, text: str) -> str:
    checkpoint = load_saved_model(run, saved)
    assert checkpoint.tokenizer is not None
    tokens = torch.tensor([checkpoint.tokenizer.encode(text)])
    with torch.no_grad():
        logits = checkpoint.model(tokens)
    return format_number(float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])))


@pytest.mark.nightly
@pytest.mark.parametrize("name", list_pretrained())
def test_all_screens_of_the_pretrained_models_have_no_messages(name: str, tmp_path: Path) -> None:
    inputs = {"tiny-dates": {"target": "2021-03-03"}, "tiny-english-encoder": {"mask": "[MASK]"}}
    with serve_page(name) as url:
        run_in_browser("all-screens", url, {"models": {name: url}, "inputs": inputs}, tmp_path)


@pytest.mark.nightly
def test_comparison_of_untrained_models_has_no_messages(tmp_path: Path) -> None:
    presets = ("tiny-gpt", "tiny-bert", "tiny-albert", "tiny-t5", "tiny-moe", "tiny-mla", "tiny-gemma")
    with ExitStack() as stack:
        models = {
            preset: stack.enter_context(serve_page(build_inspector(ct.build(preset, seed=0), name=preset)))
            for preset in presets
        }
        facts = {"models": models, "inputs": {}, "screens": ["Compare"]}
        run_in_browser("all-screens", models["tiny-gpt"], facts, tmp_path)


@pytest.mark.nightly
def test_patching_maps_of_large_models_are_measured_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_patches = ActivationPatching.run_patches

    def run_slowly(*args: Any) -> Tensor:
        time.sleep(0.5)
        return run_patches(*args)

    monkeypatch.setattr(activation_patching, "MAX_FAST_FLOPS", 0)
    monkeypatch.setattr(ActivationPatching, "run_patches", run_slowly)
    with serve_page("tiny-english") as url:
        run_in_browser("compare-on-request", url, {}, tmp_path)


def run_in_browser(name: str, page: str, facts: dict[str, Any], tmp_path: Path) -> None:
    """Run a file of web/e2e in Chromium."""
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    node, _ = find_node_and_npm()
    command = [node, "e2e/run-tests.mjs", page, str(tmp_path / "facts.json"), name]
    process = subprocess.run(command, cwd=ROOT / "web", capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
