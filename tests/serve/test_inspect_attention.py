"""What the page says of heads is what the library says."""

import pytest
import torch
from support.inspector import open_inspector, random_token_ids, run_query

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.analysis import attention_entropy, direct_logit_attribution, head_scores
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.queries.attention import THUMBNAIL_SIZE

pytestmark = pytest.mark.unchecked

ONE = ("tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-mla", "tiny-bert", "tiny-modernbert", "tiny-albert")


def traced(of: Inspector, tokens: list[int], source: list[int] | None = None, **edits: object) -> ct.trace:
    with ct.trace(of.model, "attn.pattern", *([] if source is None else ["cross.pattern"])) as t:
        args = [torch.tensor([x]) for x in (source, tokens) if x is not None]
        with torch.no_grad():
            of.model.encode(*args) if "decoder" not in of.model.stacks else of.model(*args)
    return t


@pytest.mark.parametrize("name", ONE)
def test_patterns_are_the_library_s(name: str) -> None:
    of = open_inspector(name)
    tokens = random_token_ids(20, of.config.vocab_size)
    t, look = traced(of, tokens), {"tokens": tokens}
    entropies = attention_entropy(of.model, tokens)
    listed = run_query(of, "attention_layers")[0]["layers"]
    assert len(listed) == len(next(iter(of.model.stacks.values())).blocks)
    for number, each in enumerate(listed):
        full = t[f"{each['name']}.pattern"][0]
        _, arrays = run_query(of, "attention_thumbnails", input=look, attention=each["name"])
        torch.testing.assert_close(arrays["thumbnails"], full.as_subclass(torch.Tensor))
        torch.testing.assert_close(arrays["entropy"], entropies.values[number])
        assert each["heads"] == len(full)
        for head in (0, each["heads"] - 1):
            facts, one = run_query(of, "attention_head", input=look, attention=each["name"], head=head)
            torch.testing.assert_close(one["pattern"], full[head].as_subclass(torch.Tensor))
            assert facts["mean_entropy"] == pytest.approx(float(entropies.values[number, head]), abs=1e-5)
            _, row = run_query(of, "attention_row", input=look, attention=each["name"], head=head, position=7)
            assert torch.equal(row["weights"], one["pattern"][7])


def test_both_texts_of_an_encoder_decoder() -> None:
    of = open_inspector("tiny-t5")
    source, tokens = random_token_ids(9, 50), random_token_ids(6, 50, 1)
    t, look = traced(of, tokens, source), {"tokens": tokens, "source": source}
    for each in run_query(of, "attention_layers")[0]["layers"]:
        facts, arrays = run_query(of, "attention_thumbnails", input=look, attention=each["name"])
        torch.testing.assert_close(arrays["thumbnails"], t[f"{each['name']}.pattern"][0].as_subclass(torch.Tensor))
        rows = 9 if each["stack"] == "encoder" else 6
        assert facts["shape"] == [rows, 6 if each["is_causal"] else 9]


def test_what_the_mask_hides_is_told_apart_from_zero() -> None:
    of = open_inspector("tiny-gemma")
    layers = run_query(of, "attention_layers")[0]["layers"]
    small = next(each for each in layers if each["window"] is not None)
    tokens = random_token_ids(small["window"] + 8, of.config.vocab_size)
    _, arrays = run_query(of, "attention_head", input={"tokens": tokens}, attention=small["name"], head=0)
    distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    assert torch.equal(arrays["visible"].bool(), (distance >= 0) & (distance < small["window"]))


def test_long_texts_are_the_strongest_of_several() -> None:
    of = open_inspector("tiny-llama")
    tokens = random_token_ids(100, of.config.vocab_size)
    _, arrays = run_query(of, "attention_thumbnails", input={"tokens": tokens}, attention="blocks.1.attn")
    full = traced(of, tokens)["blocks.1.attn.pattern"][0].as_subclass(torch.Tensor)
    assert arrays["thumbnails"].shape == (4, THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    assert torch.equal(arrays["thumbnails"].amax((1, 2)), full.amax((1, 2)))
    assert not arrays["visible"][0, -1]
    assert arrays["visible"].diagonal().all()


def test_a_sink_is_a_place_of_its_own() -> None:
    config = ct.config("tiny-gpt").model_dump(mode="json")
    config["decoder"]["block"][0]["attention"]["sink"] = True
    model = ct.build(config, seed=0)
    of = Inspector(model, TokenizerAdapter(model.config.vocab_size))
    _, arrays = run_query(of, "attention_head", input={"tokens": [1, 2, 3, 4]}, attention="blocks.0.attn", head=1)
    torch.testing.assert_close(arrays["sink_weight"] + arrays["pattern"].sum(-1), torch.ones(4))
    assert (arrays["sink_weight"] > 0).all()
    assert run_query(of, "attention_layers")[0]["layers"][0]["has_sink"]


@pytest.mark.parametrize("site", ["pattern", "scores", "z"])
def test_patterns_that_are_changed_themselves(site: str) -> None:
    of = open_inspector("tiny-gpt")
    edits = {f"blocks.0.attn.{site}": {"do": "scale", "value": 0.5, "heads": [1]}}
    tokens = random_token_ids(9, 100)
    with ct.edit(of.model, edits):
        t = traced(of, tokens)
    for layer in (0, 1):
        for head in (0, 1):
            given = {"input": {"tokens": tokens, "edits": edits}, "attention": f"blocks.{layer}.attn", "head": head}
            got = run_query(of, "attention_head", **given)[1]["pattern"]
            torch.testing.assert_close(got, t[f"blocks.{layer}.attn.pattern"][0, head].as_subclass(torch.Tensor))


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-t5"])
@pytest.mark.parametrize("edits", [{}, {"*blocks.1.ffn.out": "zero"}])
def test_credit_is_direct_logit_attribution(name: str, edits: dict[str, str]) -> None:
    of = open_inspector(name)
    tokens, source = random_token_ids(8, 50), random_token_ids(5, 50, 1) if name == "tiny-t5" else None
    look = {"tokens": tokens, "edits": edits} | ({} if source is None else {"source": source})
    for token in (None, 7):
        facts, _ = run_query(of, "logit_attribution", input=look, position=5, token=token)
        if edits:
            with ct.edit(of.model, edits):
                told = direct_logit_attribution(of.model, tokens, token, position=5, source=source, by_head=True)
        else:
            told = direct_logit_attribution(of.model, tokens, token, position=5, source=source, by_head=True)
        mine = [amount for row in facts["heads"].values() for amount in row]
        theirs = [float(v) for label, v in zip(told.labels[0], told.values, strict=True) if label[-1].isdigit()]
        assert sorted(mine) == pytest.approx(sorted(theirs), abs=1e-5)
        assert facts["attribution_sum"] == pytest.approx(float(told.values.sum()), abs=1e-4)
        assert facts["attribution_sum"] == pytest.approx(facts["logit"], abs=1e-3)
        kind = "decoder.blocks.1.cross" if source else "blocks.1.attn"
        label = "1.cross.2" if source else "1.attn.2"
        assert facts["heads"][kind][2] == pytest.approx(float(told.select(component=label)), abs=1e-5)


def test_kinds_of_heads() -> None:
    of = open_inspector("tiny-llama")
    facts, arrays = run_query(of, "head_types")
    assert torch.equal(arrays["scores"], head_scores(of.model, batch_size=4).values)
    assert facts["head_types"] == ["previous_token", "duplicate_token", "induction", "first_token"]
    assert facts["attention_names"][1] == "blocks.1.attn"


def test_what_cannot_be_asked() -> None:
    of = open_inspector("tiny-gpt")
    look = {"tokens": [1, 2, 3]}
    with pytest.raises(InputError, match="no attention of this model"):
        run_query(of, "attention_thumbnails", input=look, attention="blocks.9.attn")
    with pytest.raises(InputError, match="heads 0 to 3"):
        run_query(of, "attention_head", input=look, attention="blocks.0.attn", head=4)
    with pytest.raises(InputError, match="3 tokens"):
        run_query(of, "logit_attribution", input=look, position=3)
    with pytest.raises(InputError, match="vocabulary ends"):
        run_query(of, "logit_attribution", input=look, position=0, token=10**6)
    with pytest.raises(InputError, match="passed by"):
        run_query(of, "attention_thumbnails", input=look | {"edits": {"blocks.0": "skip"}}, attention="blocks.0.attn")
    with pytest.raises(InputError, match="post-norm"):
        run_query(open_inspector("tiny-bert"), "logit_attribution", input=look, position=0)
