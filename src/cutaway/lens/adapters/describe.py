"""`describe_model`: the sites and the structure of a model of any library, as the analyses need them."""

from collections.abc import Mapping
from typing import Any, Literal

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike, unwrap_model
from cutaway.lens.adapters.cutaway import cutaway_sites
from cutaway.lens.adapters.described_model import DescribedModel, RunModel
from cutaway.lens.adapters.stated_sites import StatedSites
from cutaway.model import Transformer


def describe_model(
    model: ModelLike,
    *,
    sites: Mapping[str, str] | None = None,
    final_norm: str | None = None,
    unembed: str | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    form: Literal["decoder", "encoder"] = "decoder",
    placement: Literal["pre", "post", "parallel"] = "pre",
    tokenizer: Any = None,
    run_model: RunModel | None = None,
) -> DescribedModel:
    """Return the model with its sites and structure. `trace`, `edit` and the analyses accept the result as a model.

    The sites of cutaway models and of transformers models (also with PEFT adapters) are known, so `describe_model` is
    only needed to pass a tokenizer. For any other nn.Module, state where its sites are:

        describe_model(
            model,
            sites={
                "embed": "transformer.drop",
                "blocks.{i}.resid_post": "transformer.h.{i}",
                "blocks.{i}.attn": "transformer.h.{i}.attn",
                "blocks.{i}.attn.z": "transformer.h.{i}.attn.c_proj.in",
                "blocks.{i}.attn.out": "transformer.h.{i}.attn.c_proj",
                "blocks.{i}.resid_mid": "transformer.h.{i}.ln_2.in",
                "blocks.{i}.ffn.hidden": "transformer.h.{i}.mlp.c_proj.in",
                "blocks.{i}.ffn.out": "transformer.h.{i}.mlp",
            },
            final_norm="transformer.ln_f",
            unembed="lm_head",
            num_heads=12,
        )

    Args:
        sites: site name → module path, both with `{i}` for the layer. The value is the output of the module, or its
            input if the path ends with `.in`. `blocks.{i}.attn` is a module that calls
            `scaled_dot_product_attention`; it gives `attn.q`, `k`, `v`, `scores`, `pattern` and `z`. Only
            `blocks.{i}.resid_post` is required; `resid_pre` and `embed` are inputs of blocks by default. An edit of the
            residual stream at the input of a norm (`resid_mid`) writes into the tensor, because the residual
            connection uses the same tensor.
        final_norm: path of the norm before the unembedding; None if the model has none.
        unembed: path of the linear layer that computes the logits.
        num_heads, num_kv_heads: number of query heads, and of key-value heads (default: the same), by which the last
            axis of `attn.q`, `k`, `v` and `z` is split.
        form: an encoder has no causal mask and no next-token loss.
        placement: where blocks have norms. With `pre`, the residual stream is the sum of the embedding and the outputs
            of all sublayers; with `post` it is normalized; with `parallel`, attention and FFN have the same input.
        tokenizer: tokenizer of cutaway or transformers, which analyses need for texts.
        run_model: function of (tokens, source) that returns the logits. The default calls the model with the tokens.
    """
    module = unwrap_model(model)
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if sites is not None:
        stated = StatedSites(module, sites, final_norm, unembed, num_heads, num_kv_heads, form, placement)
        return DescribedModel(module, stated.site_map(), stated.structure(), tokenizer, run_model, is_stated=True)
    if final_norm is not None or unembed is not None or num_heads is not None:
        raise InputError("sites is missing; with final_norm, unembed or num_heads, state the module paths of the sites")
    if isinstance(module, Transformer):
        if run_model is not None:
            raise InputError(
                "run_model is set, but the model is a cutaway model, which is called directly; leave it out"
            )
        return DescribedModel(module, cutaway_sites(module), module, tokenizer, run_model)
    # Imported here because this module imports all families.
    from cutaway.lens.adapters.transformers import describe_transformers

    site_map, structure = describe_transformers(module)
    if structure is None:
        reason = next(iter(site_map.unavailable.values()))
        name = type(module).__name__
        raise InputError(f"the structure of {name} is not known: {reason}; state it with lens.describe_model(sites=…)")
    return DescribedModel(module, site_map, structure, tokenizer, run_model)


def describe_if_needed(model: ModelLike) -> Transformer | DescribedModel:
    """Return a cutaway model itself, and any other model with its description."""
    if isinstance(model, DescribedModel) and not isinstance(model.model, Transformer):
        return model
    module = unwrap_model(model)
    return module if isinstance(module, Transformer) else describe_model(model)
