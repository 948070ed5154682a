"""Which recipe a directory's tokenizer follows, from the class it names and the model it belongs to."""

from collections.abc import Mapping
from typing import Any

from cutaway.text.recipes import RECIPES, Recipe
from cutaway.text.settings import Settings

_MODELS = {
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
    # These models' directories often name a class that is not theirs.
    "": "mistral mixtral ministral ministral3 mistral3 mistral_large4 pixtral voxtral phi3 phi3_v phimoe olmo2 olmo3 "
    "flex_olmo granite granitemoe granitemoehybrid granitemoeshared stablelm glm glm4 glm4_moe gpt_bigcode modernbert "
    "modernbert-decoder nemotron persimmon internlm2 minicpm3 minimax_m2 jamba arctic ernie4_5 ernie4_5_moe umt5 "
    "xlm-roberta-xl nystromformer bigbird_pegasus pegasus_x hyperclovax llava llava_next smolvlm",
}
_OF_MODEL = {model: name for name, models in _MODELS.items() for model in models.split()}
_ALIASES = {
    "BertTokenizer": "DistilBertTokenizer ElectraTokenizer MobileBertTokenizer ConvBertTokenizer SqueezeBertTokenizer",
    "RobertaTokenizer": "BartTokenizer LongformerTokenizer LEDTokenizer",
    "LlamaTokenizer": "Phi3Tokenizer",
}
_SAME_CLASS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}


def recipe_for(
    settings: Settings, config: Mapping[str, Any], tokenizer_json: Mapping[str, Any] | None
) -> Recipe | None:
    """None: tokenizer.json as it stands, or the vocabulary file's own rules."""
    declared = settings.text("tokenizer_class") or config.get("tokenizer_class")
    declared = declared.removesuffix("Fast") if isinstance(declared, str) else None
    model = config.get("model_type")
    registered = _OF_MODEL.get(model) if isinstance(model, str) else None
    name = _SAME_CLASS.get(declared, declared) if declared else registered
    if name == "LlamaTokenizer" and tokenizer_json is not None and _is_byte_level(tokenizer_json):
        return None
    if registered is not None and registered != name:
        if registered == "":
            return None
        if model == "qwen2":  # the one registered class that overrules what a directory declares
            name = registered
    recipe = RECIPES.get(name) if name else None
    if recipe is not None and tokenizer_json is not None:
        model_json = tokenizer_json.get("model")
        if not isinstance(model_json, dict) or model_json.get("type", recipe.kind) != recipe.kind:
            return None
    return recipe


def _is_byte_level(tokenizer_json: Mapping[str, Any]) -> bool:
    """Llama 3's files declare Llama 2's class."""
    parts = [tokenizer_json.get("pre_tokenizer"), tokenizer_json.get("decoder")]
    for part in parts:
        if isinstance(part, dict):
            nested = [*_list(part.get("pretokenizers")), *_list(part.get("decoders"))]
            if any(isinstance(one, dict) and one.get("type") == "ByteLevel" for one in [part, *nested]):
                return True
    return False


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
