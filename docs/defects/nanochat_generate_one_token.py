"""nanochat's `GPT.generate` raises for a prompt of one token, such as <|bos|>: the forward pass without a cache asserts
that there are two, because it is also the one for training. `Engine.generate` accepts it. Found by `causality`. Run it
with a clone of nanochat in PYTHONPATH."""

from types import SimpleNamespace

from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig

model = GPT(GPTConfig(sequence_len=64, vocab_size=50, n_layer=2, n_head=4, n_kv_head=4, n_embd=32, window_pattern="L"))
model.init_weights()
tokenizer = SimpleNamespace(encode_special=lambda text: -1, get_bos_token_id=lambda: -1)
engine = Engine(model, tokenizer)
for prompt in ([1, 2], [1]):
    found = engine.generate_batch(prompt, max_tokens=3, temperature=0.0)[0][0][len(prompt) :]
    print(f"prompt {prompt}: Engine.generate {found}")
    try:
        found = list(model.generate(prompt, 3, temperature=0.0))
    except AssertionError as error:
        found = f"AssertionError: {error}"
    print(f"prompt {prompt}: GPT.generate {found}")
