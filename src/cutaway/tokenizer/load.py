"""Load a tokenizer from a model directory: detect its files, resolve its class, build its pipeline."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from cutaway.bounded_files import parse_json_object
from cutaway.errors import InputError
from cutaway.tokenizer import file_io
from cutaway.tokenizer.file_io import JsonObject, path_exists, read_bytes, read_text, wrap_tokenizers_errors
from cutaway.tokenizer.formats import sentencepiece as spm
from cutaway.tokenizer.formats import tokenizer_json as json_format
from cutaway.tokenizer.formats.marian import load_marian_tokenizer
from cutaway.tokenizer.formats.tiktoken import build_tiktoken_pipeline, is_tiktoken_file, parse_tiktoken
from cutaway.tokenizer.pipelines import PIPELINES, PipelineSpec, bos_eos_processor, sentinel_tokens
from cutaway.tokenizer.split_patterns import GPT4_SPLIT_PATTERN, QWEN2_SPLIT_PATTERN
from cutaway.tokenizer.tokenizer import Tokenizer
from cutaway.tokenizer.tokenizer_config import TokenizerConfig, as_special, load_tokenizer_config, token_content
from cutaway.tokenizer.vocabulary import Vocabulary, validate_vocab

_MODEL_TYPES_BY_CLASS = {
    "GPT2Tokenizer": "gpt2 gpt_neo gptj opt phi codegen starcoder2 dbrx jais2",
    "GPTNeoXTokenizer": "gpt_neox olmo olmoe mpt mamba mamba2 falcon_mamba rwkv xlstm",
    "Qwen2Tokenizer": "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe",
    "CohereTokenizer": "cohere cohere2",
    "RobertaTokenizer": "roberta roberta-prelayernorm bart longformer data2vec-text lilt ibert",
    "LlamaTokenizer": "idefics idefics2",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma t5gemma",
    "T5Tokenizer": "t5 mt5 switch_transformers",
    "XLMRobertaTokenizer": "xlm-roberta xmod gte",
    "AlbertTokenizer": "albert yoso",
    "BertTokenizer": "bert distilbert electra convbert ernie megatron-bert nomic_bert squeezebert layoutlm",
    "MPNetTokenizer": "mpnet",
    # The class "" means that tokenizer.json is used unchanged: directories of these models often declare a wrong class.
    "": "mistral mixtral ministral ministral3 mistral3 mistral_large4 pixtral voxtral phi3 phi3_v phimoe olmo2 olmo3 "
    "flex_olmo granite granitemoe granitemoehybrid granitemoeshared stablelm glm glm4 glm4_moe gpt_bigcode modernbert "
    "modernbert-decoder nemotron persimmon internlm2 minicpm3 minimax_m2 jamba arctic ernie4_5 ernie4_5_moe umt5 "
    "xlm-roberta-xl nystromformer bigbird_pegasus pegasus_x hyperclovax llava llava_next smolvlm",
}
_CLASS_BY_MODEL_TYPE = {model: name for name, models in _MODEL_TYPES_BY_CLASS.items() for model in models.split()}
_ALIASES_BY_CLASS = {
    "BertTokenizer": "DistilBertTokenizer ElectraTokenizer MobileBertTokenizer ConvBertTokenizer SqueezeBertTokenizer",
    "RobertaTokenizer": "BartTokenizer LongformerTokenizer LEDTokenizer",
    "LlamaTokenizer": "Phi3Tokenizer",
}
_CLASS_BY_ALIAS = {alias: name for name, aliases in _ALIASES_BY_CLASS.items() for alias in aliases.split()}


def _resolve_pipeline(
    cfg: TokenizerConfig, model_config: JsonObject, tokenizer_json: JsonObject | None
) -> PipelineSpec | None:
    """Return the pipeline of the tokenizer class, or None if tokenizer.json or the vocabulary file defines it."""
    declared = cfg.get_str("tokenizer_class") or model_config.get("tokenizer_class")
    declared = declared.removesuffix("Fast") if isinstance(declared, str) else None
    model = model_config.get("model_type")
    registered = _CLASS_BY_MODEL_TYPE.get(model) if isinstance(model, str) else None
    name = _CLASS_BY_ALIAS.get(declared, declared) if declared else registered
    if name == "LlamaTokenizer" and tokenizer_json is not None and _uses_byte_level(tokenizer_json):
        return None
    if registered is not None and registered != name:
        if registered == "":
            return None
        if model == "qwen2":  # the only model type whose registered class overrides the declared class
            name = registered
    pipeline = PIPELINES.get(name) if name else None
    if pipeline is not None and tokenizer_json is not None:
        model_json = tokenizer_json.get("model")
        if not isinstance(model_json, dict) or model_json.get("type", pipeline.model_type) != pipeline.model_type:
            return None
    return pipeline


def _uses_byte_level(tokenizer_json: JsonObject) -> bool:
    """Whether tokenizer.json is byte-level BPE. Llama 3 is, although its files declare the class of Llama 2."""
    steps = json_format.flatten_steps([tokenizer_json.get("pre_tokenizer"), tokenizer_json.get("decoder")])
    return any(step.get("type") == "ByteLevel" for step in steps)


def _assemble_tokenizer(
    backend: tokenizers.Tokenizer,
    cfg: TokenizerConfig,
    *,
    pipeline: PipelineSpec | None = None,
    vocabulary: Vocabulary | None = None,
    default_special_tokens: Mapping[str, str] | None = None,
    from_tokenizer_json: bool = False,
) -> Tokenizer:
    """Add special tokens and post-processor to a backend and build a Tokenizer.

    With `from_tokenizer_json`, the vocabulary is from a tokenizer.json, which also determines BOS and EOS.
    """
    defaults = pipeline.default_special_tokens if pipeline else default_special_tokens or {}
    special_tokens = cfg.resolve_special_tokens(defaults)
    mask = special_tokens.get("mask_token")
    if pipeline is not None and pipeline.mask_lstrip and isinstance(mask, str):
        special_tokens["mask_token"] = AddedToken(mask, lstrip=True, special=True)
    extra: Sequence[str | AddedToken] = vocabulary.added_tokens if vocabulary else []
    if cfg.extra_special_tokens is not None:
        extra = cfg.extra_special_tokens
    wrap_tokenizers_errors(cfg.source, lambda: _add_special_tokens(backend, cfg, special_tokens, extra))
    contents = {name: token_content(token) for name, token in special_tokens.items()}
    all_ids = {name: (token, backend.token_to_id(token)) for name, token in contents.items()}
    ids = {name: (token, token_id) for name, (token, token_id) in all_ids.items() if token_id is not None}
    if pipeline is not None and pipeline.post_processor is not None:
        try:
            backend.post_processor = pipeline.post_processor(ids)
        except KeyError as error:
            missing = f"{error.args[0]} to null, but its class requires this token"
            raise InputError(f"{cfg.source} sets {missing}; set it") from None
    elif from_tokenizer_json and (pipeline is None or pipeline.keep_json_post_processor):
        if pipeline is not None and vocabulary is not None and vocabulary.post_processor is not None:
            backend.post_processor = vocabulary.post_processor
    else:
        add_bos_eos = cfg.get_bool("add_bos_token", False), cfg.get_bool("add_eos_token", False)
        add_bos_eos = (False, False) if from_tokenizer_json else add_bos_eos
        backend.post_processor = bos_eos_processor(ids.get("bos_token"), ids.get("eos_token"), add_bos_eos)
    side = cfg.get_str("padding_side") or (pipeline.padding_side if pipeline else "right")
    if side not in ("left", "right"):
        raise InputError(f"{cfg.source} sets padding_side to {side!r:.60}; it must be left or right")
    return Tokenizer(
        backend,
        special_tokens_map=contents,
        chat_template=cfg.chat_template,
        model_max_length=cfg.model_max_length,
        padding_side="left" if side == "left" else "right",
        clean_up_tokenization_spaces=cfg.get_bool("clean_up_tokenization_spaces", False),
        split_special_tokens=cfg.get_bool("split_special_tokens", False),
    )


def _add_special_tokens(
    backend: tokenizers.Tokenizer,
    cfg: TokenizerConfig,
    special_tokens: Mapping[str, str | AddedToken],
    extra_special_tokens: Sequence[str | AddedToken],
) -> None:
    special = [*special_tokens.values(), *cfg.model_specific_special_tokens]
    special_contents = {token_content(token) for token in special}
    tokens: list[str | AddedToken] = [token for _, token in sorted(cfg.added_tokens_decoder.items())]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {token_content(token) for token in tokens}
    for token in [*special, *extra_special_tokens]:
        if token_content(token) not in known:
            tokens.append(token)
            known.add(token_content(token))
    backend.add_tokens([as_special(t) if isinstance(t, str) or t.content in special_contents else t for t in tokens])


_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_MAX_RESERVED_TOKENS = 1 << 16
"""Maximum number of special tokens after the ranks of a tiktoken file; Llama 3 has 256."""


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Load the tokenizer of a model directory, or return None if it has none. Code (`auto_map`) is ignored."""
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; pass the directory of the model files")
    config = file_io.read_json_object(directory / "config.json") if path_exists(directory / "config.json") else {}
    tokenizer_json = directory / "tokenizer.json"
    if path_exists(tokenizer_json):
        return _load_tokenizer_json(tokenizer_json, config)
    cfg = load_tokenizer_config(directory)
    pipeline = _resolve_pipeline(cfg, config, None)
    if path_exists(directory / "source.spm") and path_exists(directory / "vocab.json"):
        return load_marian_tokenizer(directory, cfg)
    names = [*_SENTENCEPIECE_FILES, "tiktoken.model", *sorted(file.name for file in directory.glob("*.tiktoken"))]
    for file in (directory / name for name in names):
        if path_exists(file):
            data = read_bytes(file)
            if file.name not in _SENTENCEPIECE_FILES or is_tiktoken_file(data):
                return _load_tiktoken(data, file, cfg, config)
            return _load_sentencepiece(data, file, cfg, pipeline)
    if path_exists(directory / "vocab.json") and path_exists(directory / "merges.txt"):
        vocabulary, default_class = _read_vocab_and_merges(directory), "GPT2Tokenizer"
    elif path_exists(directory / "vocab.txt"):
        vocabulary, default_class = _read_vocab_txt(directory / "vocab.txt"), "BertTokenizer"
    else:
        return None
    if pipeline is None or pipeline.model_type != vocabulary.model_type:
        pipeline = PIPELINES[default_class]
    return _build_tokenizer(pipeline, vocabulary, cfg, cfg.source)


def _load_tokenizer_json(path: Path, model_config: JsonObject) -> Tokenizer:
    text = read_text(path)
    content = parse_json_object(text, path, InputError)
    cfg = load_tokenizer_config(path.parent, content)
    pipeline = _resolve_pipeline(cfg, model_config, content)
    vocabulary = json_format.parse_vocabulary(content, path)
    json_format.check_text_expansion(content, path)
    json_format.check_regular_expressions(content, path)
    if pipeline is None:
        backend = json_format.parse_tokenizer_json(text, path)
        return _assemble_tokenizer(backend, cfg, from_tokenizer_json=True)
    vocabulary.added_tokens = sentinel_tokens(pipeline, cfg)
    return _build_tokenizer(pipeline, vocabulary, cfg, path, from_tokenizer_json=True)


def _build_tokenizer(
    pipeline: PipelineSpec,
    vocabulary: Vocabulary,
    cfg: TokenizerConfig,
    source: object,
    *,
    from_tokenizer_json: bool = False,
) -> Tokenizer:
    """Build the pipeline of a tokenizer class from a vocabulary."""
    backend = wrap_tokenizers_errors(source, lambda: pipeline.build(vocabulary, cfg))
    return _assemble_tokenizer(
        backend, cfg, pipeline=pipeline, vocabulary=vocabulary, from_tokenizer_json=from_tokenizer_json
    )


def _load_sentencepiece(data: bytes, path: Path, cfg: TokenizerConfig, pipeline: PipelineSpec | None) -> Tokenizer:
    try:
        model = spm.parse_sentencepiece_model(data)
        if pipeline is not None and pipeline.model_type == "WordPiece":
            pipeline = None
        extra_tokens = sentinel_tokens(pipeline, cfg) if pipeline is not None else []
        vocabulary = spm.build_vocabulary(model, pipeline, extra_tokens)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if pipeline is not None:
        return _build_tokenizer(pipeline, vocabulary, cfg, path)
    backend = wrap_tokenizers_errors(path, lambda: spm.build_sentencepiece_pipeline(model, vocabulary))
    return _assemble_tokenizer(backend, cfg, vocabulary=vocabulary, default_special_tokens=model.special_tokens_map)


def _load_tiktoken(data: bytes, path: Path, cfg: TokenizerConfig, model_config: JsonObject) -> Tokenizer:
    """Build a tokenizer from tiktoken ranks. added_tokens_decoder has the special tokens; other ids are reserved."""
    vocabulary = parse_tiktoken(data, path)
    pattern = QWEN2_SPLIT_PATTERN if model_config.get("model_type") in ("qwen", "qwen2") else GPT4_SPLIT_PATTERN
    backend = wrap_tokenizers_errors(path, lambda: build_tiktoken_pipeline(vocabulary, [pattern]))
    last = max(cfg.added_tokens_decoder, default=-1)
    first = max(vocabulary.ids.values()) + 1
    if last - first > _MAX_RESERVED_TOKENS:
        extra = f"more than {_MAX_RESERVED_TOKENS} ids past the last rank {first - 1}"
        raise InputError(f"{cfg.source} adds the token id {last}, {extra}; fix the file")
    contents = {token_id: token.content for token_id, token in cfg.added_tokens_decoder.items()}
    names = [contents.get(token_id, f"<|reserved_token_{token_id}|>") for token_id in range(first, last + 1)]
    wrap_tokenizers_errors(path, lambda: backend.add_special_tokens(names))
    return _assemble_tokenizer(backend, cfg)


def _read_vocab_and_merges(directory: Path) -> Vocabulary:
    ids = validate_vocab(file_io.read_json_object(directory / "vocab.json"), directory / "vocab.json")
    merges = []
    for number, line in enumerate(read_text(directory / "merges.txt").split("\n"), 1):
        if line.startswith("#version") or not line.strip():
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2:
            raise InputError(f"{directory / 'merges.txt'} line {number} is not two tokens; download the file again")
        merges.append((parts[0], parts[1]))
    return Vocabulary("BPE", ids=ids, merges=merges)


def _read_vocab_txt(path: Path) -> Vocabulary:
    lines = read_text(path).removesuffix("\n").split("\n")
    return Vocabulary("WordPiece", ids=validate_vocab({line.rstrip(): n for n, line in enumerate(lines)}, path))
