"""Default input of the page: the greedy output of an encoder-decoder as target, a text with a mask for an encoder."""

import time
from dataclasses import replace

from cutaway.errors import CutawayError
from cutaway.generate.engine.config import build_engine_config
from cutaway.generate.engine.engine import Engine
from cutaway.generate.generation_config import GenerationConfig, apply_generation_config
from cutaway.generate.sampling.sampling_params import build_sampling_params
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer
from cutaway.pretrained import EXAMPLE_TEXTS, example_text
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.tokenizer import Tokenizer

MAX_NEW_TOKENS = 32
"""Maximum number of tokens of the default target."""
MAX_SECONDS = 2.0
"""Maximum time to generate the default target. The step that exceeds it is the last."""
UNTRAINED_TARGET = "The cat"
"""Default target of an encoder-decoder without trained weights, and of one whose output is empty."""
MASK_TEXT = "The {mask} sat on the mat."


def build_tokenizer_adapter(
    model: Transformer,
    tokenizer: Tokenizer | None,
    generation_config: GenerationConfig | None,
    text: str | None,
    name: str,
) -> TokenizerAdapter:
    """Build the tokenizer adapter with the default input. `text` is the text (the source of an encoder-decoder)."""
    adapter = TokenizerAdapter(model.config.vocab_size, tokenizer, generation_config=generation_config)
    if isinstance(model, EncoderDecoder):
        start_token = generation_config.decoder_start_token_id if generation_config else None
        adapter = replace(adapter, decoder_start_token_id=start_token or 0, default_source=text or example_text(name))
        target = "" if tokenizer is None else _generate_target(model, adapter, tokenizer)
        adapter = replace(adapter, default_text=target or UNTRAINED_TARGET)
        # The last position of a finished output predicts the end of the sequence, the one before it the last token.
        return replace(adapter, default_position=max(0, len(adapter.encode(adapter.default_text)) - 2))
    if text is None and isinstance(model, EncoderOnly) and adapter.mask_token and name not in EXAMPLE_TEXTS:
        text = MASK_TEXT.format(mask=adapter.mask_token)
    adapter = replace(adapter, default_text=text or example_text(name))
    if isinstance(model, EncoderOnly) and adapter.mask_token_id is not None:
        token_ids = adapter.encode(adapter.default_text)
        if adapter.mask_token_id in token_ids:
            return replace(adapter, default_position=token_ids.index(adapter.mask_token_id))
    return adapter


def _generate_target(model: EncoderDecoder, adapter: TokenizerAdapter, tokenizer: Tokenizer) -> str:
    """Return the greedy output for the default source, of at most MAX_NEW_TOKENS tokens and MAX_SECONDS seconds.

    Return "" if the model cannot generate.
    """
    generation_config = adapter.generation_config or GenerationConfig(
        decoder_start_token_id=adapter.decoder_start_token_id
    )
    try:
        source = adapter.encode_source(adapter.default_source or "")
        params = build_sampling_params({"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS})
        engine = Engine(
            build_engine_config(
                model,
                generation_config,
                required_len=1 + MAX_NEW_TOKENS,
                max_num_seqs=1,
                compile=False,
                max_source_len=max(1, len(source)),
            ),
            tokenizer=tokenizer,
        )
        forced_bos = generation_config.forced_bos_token_id
        request = engine.submit(
            source,
            apply_generation_config(params, generation_config, 1),
            seed=0,
            output_prefix=[] if forced_bos is None else [forced_bos],
        )
        deadline = time.monotonic() + MAX_SECONDS
        while not request.finished.is_set():
            engine.step()
            if request.output.tokens and time.monotonic() > deadline:
                break
        text = tokenizer.decode(request.output.tokens)
        engine.close()
    except CutawayError:  # such as a source that is too long: the page shows the error for the input itself
        return ""
    return text
