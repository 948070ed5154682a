"""litgpt's YaRN divides the high RoPE frequencies by `factor` and keeps the low ones. The paper (arXiv 2309.00071),
the authors' code and transformers do the opposite. Found by `rope-scaling`."""

from litgpt.model import build_rope_cache

size, base, factor = 16, 10000, 4.0
yarn = {"factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 32}
cos, sin = build_rope_cache(seq_len=2, n_elem=size, base=base, extra_config=yarn)
for pair in range(size // 2):
    frequency = base ** (-2 * pair / size)
    measured = sin[1, pair].atan2(cos[1, pair]).item()
    wavelength = 2 * 3.141592653589793 / frequency
    print(f"pair {pair}, wavelength {wavelength:8.0f} tokens: frequency divided by {frequency / measured:.2f}")
print("expected: 1.00 for wavelengths far below 32 tokens, 4.00 for wavelengths above 32 tokens")
