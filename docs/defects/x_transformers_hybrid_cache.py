"""x-transformers: a recurrent module beside attention (`attn_hybrid_module`) that reads every n-th token is wrong with
a KV cache: a new token is padded to n tokens, so it continues the first of the n sequences, and zeros continue the
others. With n = 1 the cache is right. `beam_search` repeats the cached keys for the beams, but not the hidden states,
and raises an error. Found by `cache-decode` and `mode-restored`."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

for every in (1, 4):
    torch.manual_seed(0)
    hybrid = {"attn_hybrid_module": torch.nn.GRU(32, 64, batch_first=True), "attn_hybrid_fold_axial_dim": every}
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, verbose=False, **hybrid)
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers).eval()
    tokens = torch.randint(64, (1, 16))
    with torch.no_grad():
        _, cache = model(tokens[:, :14], return_intermediates=True)
        first, cache = model(tokens[:, :15], cache=cache, return_intermediates=True)
        steps = torch.cat([first, model(tokens, cache=cache)], dim=1)
        change = (steps - model(tokens)[:, -2:]).abs().max()
    print(f"attn_hybrid_fold_axial_dim={every}: cached logits differ by {change:.1e}")
    try:
        AutoregressiveWrapper(model).beam_search(tokens, 4)
    except RuntimeError as error:
        print(f"beam_search: RuntimeError: {str(error)[:50]}")
