"""Adapters in PEFT's format: those of PEFT opened here, and those written here opened by PEFT, for all families."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.family_parity import PeerModel
from support.transformers_models import FAMILIES as ALL_FAMILIES
from support.transformers_models import build_transformers_model, find_peers
from torch import Tensor

import cutaway as ct
from cutaway.config.lora import LoRA
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.peft_format import check_exportable, load_adapter, save_adapter
from cutaway.model.adapters.lora import LoRAWeights

FAMILIES = [family for family in ALL_FAMILIES if family != "mpt"]  # transformers' MPT is patched in its parity test
LINEAR_TYPES = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)


def randomize_adapters(model: torch.nn.Module, seed: int = 0) -> None:
    """Random B and magnitude, so that the adapters have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_b" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))


def assert_logits_close(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


def inputs_of(config: Any) -> Tensor:
    sizes = [getattr(config, key, None) for key in ("vocab_size", "decoder_vocab_size")]
    return torch.randint(5, min(size for size in sizes if size), (2, 9), generator=torch.Generator().manual_seed(1))


def peer_logits(model: Any, tokens: Tensor, is_seq2seq: bool) -> Tensor:
    with torch.no_grad():
        output = model(input_ids=tokens, decoder_input_ids=tokens) if is_seq2seq else model(input_ids=tokens)
    logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits


def our_logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    is_seq2seq = len(checkpoint.model.stacks) == 2
    with torch.no_grad():
        if is_seq2seq:
            logits: Tensor = checkpoint.model(tokens, tokens)
        else:
            logits = checkpoint.model(tokens) if checkpoint.model.head is not None else checkpoint.model.encode(tokens)
    return logits


def block_linears(model: Any) -> list[str]:
    """Names of the linear layers in the blocks. In a MoE model, PEFT replaces those of the FFN by parameters."""
    names = [name for name, module in model.named_modules() if isinstance(module, LINEAR_TYPES)]
    numbered = [name for name in names if any(part.isdigit() for part in name.split("."))]
    is_moe = any("experts" in name for name, _ in model.named_parameters())
    return [name for name in numbered if not is_moe or "attn" in name or "attention" in name]


def small_peer(family: str) -> PeerModel:
    return find_peers(family, seed=1)[0]


@pytest.mark.sample(8)
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_layers_of_a_family(family: str, use_dora: bool, tmp_path: Path) -> None:
    peer = small_peer(family)
    model = build_transformers_model(peer)
    if family != "xglm":  # its mask overflows in fp64; the others are compared in fp64 because of rounding errors
        model = model.double()
    model.save_pretrained(tmp_path / "base")
    tokens = inputs_of(peer.config)
    is_seq2seq = bool(getattr(peer.config, "is_encoder_decoder", False))
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=block_linears(model), use_dora=use_dora)
    theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
    randomize_adapters(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = peer_logits(theirs, tokens, is_seq2seq)

    ours = load_adapter(ct.load(tmp_path / "base"), tmp_path / "theirs")
    assert_logits_close(our_logits(ours, tokens), expected)
    with ours.model.disable_adapters():
        assert_logits_close(our_logits(ours, tokens), peer_logits(model, tokens, is_seq2seq))
    merged = Checkpoint(ours.model.merge_and_unload(), ours.config)
    assert_logits_close(our_logits(merged, tokens), expected)

    save_adapter(ours, tmp_path / "ours")
    reopened = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval()
    assert_logits_close(peer_logits(reopened, tokens, is_seq2seq), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox", "bert", "bart"])
def test_adapter_of_our_own_is_opened_by_peft(family: str, tmp_path: Path) -> None:
    """Layers with an A of their own, although the checkpoint stores some of them as one matrix."""
    peer = small_peer(family)
    model = build_transformers_model(peer)
    model.save_pretrained(tmp_path / "base")
    tokens = inputs_of(peer.config)
    is_seq2seq = bool(getattr(peer.config, "is_encoder_decoder", False))
    ours = ct.load(tmp_path / "base")
    ours.model.add_adapter({"rank": 2, "alpha": 3.0, "targets": ["attn.q", "attn.v", "ffn.*"], "use_rslora": True})
    randomize_adapters(ours.model)
    save_adapter(ours, tmp_path / "ours", base="some/model")
    assert (
        json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/model"
    )
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval()
    assert_logits_close(our_logits(ours, tokens), peer_logits(opened, tokens, is_seq2seq))
    again = load_adapter(ct.load(tmp_path / "base"), tmp_path / "ours")
    assert_logits_close(our_logits(again, tokens), our_logits(ours, tokens))


MOE_FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_adapters_of_experts(family: str, tmp_path: Path) -> None:
    """One adapter per expert and matrix. PEFT converts them, if all layers of the model are mixtures of experts."""
    peer = small_peer(family)
    model = build_transformers_model(peer).double()
    model.save_pretrained(tmp_path / "base")
    tokens = inputs_of(peer.config)
    ours = ct.load(tmp_path / "base")
    ours.model.add_adapter({"rank": 2, "alpha": 3.0})
    randomize_adapters(ours.model)
    base = our_logits(ct.load(tmp_path / "base"), tokens)
    assert float((our_logits(ours, tokens) - base).abs().max()) > 1e-3
    ct.save_adapter(ours, tmp_path / "ours")
    again = load_adapter(ct.load(tmp_path / "base"), tmp_path / "ours")
    torch.testing.assert_close(our_logits(again, tokens), our_logits(ours, tokens), rtol=0, atol=0)
    merged = Checkpoint(ours.model.merge_and_unload(), ours.config)
    assert_logits_close(our_logits(merged, tokens), our_logits(ours, tokens))
    if family in ("mixtral", "olmoe"):
        opened = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval()
        assert_logits_close(our_logits(ours, tokens), peer_logits(opened, tokens, False))


def test_experts_of_one_tensor_are_refused_before_training(tmp_path: Path) -> None:
    build_transformers_model(small_peer("gpt_oss")).save_pretrained(tmp_path / "base")
    checkpoint = ct.load(tmp_path / "base")
    with pytest.raises(InputError, match=r"leave it out of targets, e\.g\. targets = \[\"attn"):
        check_exportable(checkpoint, LoRA(rank=2))
    check_exportable(checkpoint, LoRA(rank=2, targets=("attn.*",)))


def test_model_without_a_family_has_names_of_its_own(tmp_path: Path) -> None:
    config = ct.config("tiny-llama").replace(vocab_size=64)
    config = ct.config(
        json.loads(config.model_dump_json()) | {"head": {"kind": "lm", "tied": False, "softcap": 5.0, "scale": 0.3}}
    )
    model = ct.build(config, seed=0)
    with pytest.raises(ConfigError):
        ct.save(model, tmp_path / "hf")
    ct.save(model, tmp_path / "base", family="cutaway")
    model.add_adapter({"rank": 2})
    randomize_adapters(model)
    save_adapter(model, tmp_path / "adapter", base=tmp_path / "base")
    tokens = torch.arange(10).unsqueeze(0)
    loaded = ct.load(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens), model(tokens), rtol=0, atol=0)


def llama_base(tmp_path: Path) -> Any:
    model = build_transformers_model(small_peer("llama"))
    model.save_pretrained(tmp_path / "base")
    return model


def test_rank_and_alpha_patterns_and_embedding(tmp_path: Path) -> None:
    model = llama_base(tmp_path)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "down_proj", "embed_tokens"],
        rank_pattern={"v_proj": 3},
        alpha_pattern={r"layers\.[0-1]\.mlp\.down_proj": 9, "^model.layers.1.self_attn.q_proj": 7},
        use_rslora=True,
    )
    theirs = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    tokens = inputs_of(theirs.config)
    ours = load_adapter(ct.load(tmp_path / "base"), tmp_path / "theirs")
    assert_logits_close(our_logits(ours, tokens), peer_logits(theirs, tokens, False))
    save_adapter(ours, tmp_path / "ours")
    reopened = peft.PeftModel.from_pretrained(llama_base(tmp_path), tmp_path / "ours").eval()
    assert_logits_close(peer_logits(reopened, tokens, False), peer_logits(theirs, tokens, False))


def write_adapter(tmp_path: Path) -> Path:
    llama_base(tmp_path)
    checkpoint = ct.load(tmp_path / "base")
    checkpoint.model.add_adapter({"rank": 2, "targets": ["attn.q"]})
    return save_adapter(checkpoint, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"bias": "all"}, "only 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names modules"),
        ({"init_lora_weights": "pissa_niter_4"}, "trained on changed weights"),
        ({"lora_bias": True}, "it adds a bias to B"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "each expert has an adapter of its own .* pass that"),
        ({"alpha_pattern": {"(": 3}}, "not a regular expression"),
        ({"r": "four"}, "r"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((ConfigError, WeightError), match=message):
        load_adapter(ct.load(tmp_path / "base"), path.parent)


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path)
    with pytest.raises(WeightError, match="base model it was trained on"):
        load_adapter(Checkpoint(ct.build("tiny-llama"), ct.config("tiny-llama"), "llama"), adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(WeightError, match="pickle"):
        load_adapter(ct.load(tmp_path / "base"), adapter)
    with pytest.raises(InputError, match="adapter_config"):
        load_adapter(ct.load(tmp_path / "base"), tmp_path)


def test_adapter_that_cannot_be_loaded_is_removed(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path)
    checkpoint = ct.load(tmp_path / "base", adapters={"good": adapter})
    randomize_adapters(checkpoint.model)
    weights = load_file(adapter / "adapter_model.safetensors")
    weights[list(weights)[-1]].fill_(float("nan"))
    save_file(weights, adapter / "adapter_model.safetensors")
    tokens = torch.arange(5, 15).unsqueeze(0)
    before = our_logits(checkpoint, tokens)
    with pytest.raises(WeightError, match="NaN"):
        load_adapter(checkpoint, adapter, "bad")
    assert list(checkpoint.model.adapters) == ["good"]
    assert torch.equal(our_logits(checkpoint, tokens), before)


def test_scaling_of_rslora_and_alpha() -> None:
    model = ct.build("tiny-llama", seed=0)
    model.add_adapter({"rank": 4, "alpha": 6.0, "targets": ["attn.q"], "use_rslora": True})
    scalings = {module.scaling for module in model.modules() if isinstance(module, LoRAWeights)}
    assert scalings == {6.0 / math.sqrt(4)}


def test_several_adapters_are_loaded_by_name(tmp_path: Path) -> None:
    """`ct.load(base, adapters=…)`: names, the active one, the other forms of the argument, and errors."""
    adapter = write_adapter(tmp_path)
    checkpoint = ct.load(tmp_path / "base")
    checkpoint.model.add_adapter({"rank": 3, "targets": ["ffn.*"]})
    randomize_adapters(checkpoint.model)
    chat = ct.save_adapter(checkpoint, tmp_path / "chat")
    tokens = torch.arange(5, 15).unsqueeze(0)
    loaded = ct.load(tmp_path / "base", adapters={"sql": adapter, "chat-2": chat})
    assert list(loaded.model.adapters) == ["sql", "chat-2"]
    assert loaded.model.active_adapter == "sql"
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    with loaded.model.use_adapter("chat-2"):
        torch.testing.assert_close(our_logits(loaded, tokens), our_logits(checkpoint, tokens), rtol=0, atol=0)
    assert list(ct.load(tmp_path / "base", adapters=[adapter, chat]).model.adapters) == ["adapter", "chat"]
    assert list(ct.load(tmp_path / "base", adapters=chat).model.adapters) == ["default"]
    with pytest.raises(InputError, match="same name"):
        ct.load(tmp_path / "base", adapters=[chat, chat])
    with pytest.raises(InputError, match="adapters is a int"):
        ct.load(tmp_path / "base", adapters=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a whole model, not an adapter"):
        ct.load(tmp_path / "base", adapters=tmp_path / "base")
    with pytest.raises(InputError, match=r"names no base model .* --adapter"):
        ct.load(chat)


def test_tokenizer_of_several_adapters(tmp_path: Path) -> None:
    """Adapters with equal tokenizers bring a chat template and stop tokens, as a single adapter does."""
    base: Any = ct.load("tiny-english")
    base.model.add_adapter({"rank": 2})
    base.tokenizer.chat_template = "{{ messages[0].content }}"
    for name in ("a", "b"):
        ct.save_adapter(base, tmp_path / name, base="tiny-english")
        base.tokenizer.save(tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    loaded: Any = ct.load("tiny-english", adapters=[tmp_path / "a", tmp_path / "b"])
    assert loaded.tokenizer.chat_template == base.tokenizer.chat_template
    assert loaded.generation_config == {"eos_token_id": [3, 7]}
    (tmp_path / "b" / "chat_template.jinja").write_text("other")
    loaded = ct.load("tiny-english", adapters=[tmp_path / "a", tmp_path / "b"])
    assert loaded.tokenizer.chat_template is None


def test_adapter_of_an_adapter_and_the_generation_config(tmp_path: Path) -> None:
    """An adapter whose base is another adapter is added to the merged base. Its generation config is used."""
    adapter = write_adapter(tmp_path)
    first = ct.load(tmp_path / "base", adapters=adapter)
    randomize_adapters(first.model)
    ct.save_adapter(first, tmp_path / "first", base=tmp_path / "base")
    merged = Checkpoint(first.model.merge_and_unload(), first.config, first.family)
    merged.model.add_adapter({"rank": 2, "targets": ["attn.v"]})
    randomize_adapters(merged.model, seed=1)
    second = ct.save_adapter(merged, tmp_path / "second", base=tmp_path / "first")
    (second / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    loaded = ct.load(second)
    assert loaded.generation_config == {"eos_token_id": [3, 7]}
    tokens = torch.arange(5, 15).unsqueeze(0)
    torch.testing.assert_close(our_logits(loaded, tokens), our_logits(merged, tokens), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_output_matrix_is_refused(family: str, tmp_path: Path) -> None:
    """PEFT's modules_to_save = lm_head replaces the output matrix, which may be tied to the embedding."""
    model = build_transformers_model(small_peer(family))
    model.save_pretrained(tmp_path / "base")
    targets = ["q_proj"] if family == "llama" else ["c_attn"]
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["lm_head"], fan_in_fan_out=family == "gpt2")
    adapted: Any = peft.get_peft_model(model, config)
    with torch.no_grad():
        adapted.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    adapted.save_pretrained(tmp_path / "adapter")
    before = ct.load(tmp_path / "base")
    weights = {key: tensor.clone() for key, tensor in before.model.state_dict().items()}
    with pytest.raises(ConfigError, match="modules_to_save is not supported for 'lm_head"):
        load_adapter(before, tmp_path / "adapter")
    assert all(torch.equal(tensor, weights[key]) for key, tensor in before.model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]])
def test_embeddings_saved_with_an_adapter(targets: list[str], tied: bool, tmp_path: Path) -> None:
    """PEFT saves the embeddings of the base model with an adapter of the embedding, and after added tokens."""
    config = small_peer("llama").config
    config.tie_word_embeddings = tied
    model: Any = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=targets)).eval()
    randomize_adapters(theirs)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    tokens = inputs_of(config)
    ours = load_adapter(ct.load(tmp_path / "base"), tmp_path / "theirs")
    assert_logits_close(our_logits(ours, tokens), peer_logits(theirs, tokens, False))

    model.resize_token_embeddings(config.vocab_size + 2)
    resized = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    resized.save_pretrained(tmp_path / "resized", save_embedding_layers=True)
    with pytest.raises(WeightError, match=r"differs from the base model's, as after tokens were added .* merge it"):
        load_adapter(ct.load(tmp_path / "base"), tmp_path / "resized")


def test_adapter_of_the_output_matrix_is_refused(tmp_path: Path) -> None:
    model = llama_base(tmp_path)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(WeightError, match="'lm_head', which cutaway has no adapters for; merge it with PEFT"):
        load_adapter(ct.load(tmp_path / "base"), tmp_path / "adapter")


@pytest.mark.parametrize("pattern", [r"(\w+)+x", ".*.*.*.*x", "a" * 501])
def test_patterns_that_take_long_are_refused(pattern: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {pattern: 4}}))
    with pytest.raises(ConfigError, match="could take very long"):
        load_adapter(ct.load(tmp_path / "base"), adapter)


def test_config_of_an_adapter_is_that_of_its_base(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path)
    with pytest.raises(ConfigError, match=r"names no base model .* pass the base model"):
        ct.config(adapter)
    ct.save_adapter(ct.load(tmp_path / "base", adapters=adapter), tmp_path / "named", base=tmp_path / "base")
    assert ct.config(tmp_path / "named") == ct.config(tmp_path / "base")
    ct.save_adapter(ct.load(tmp_path / "base", adapters=adapter), tmp_path / "cycle", base=tmp_path / "cycle")
    packaged = ct.load("tiny-english")
    packaged.model.add_adapter({"rank": 2})
    ct.save_adapter(packaged, tmp_path / "packaged", base="tiny-english")
    assert ct.config(tmp_path / "packaged") == packaged.config
    for read in (ct.load, ct.config):
        with pytest.raises((ConfigError, InputError), match="base model"):
            read(tmp_path / "cycle")  # type: ignore[operator]
