"""performer-pytorch: the mask sets the values of padding to zero, but not its keys, which still count in the normalizer
of linear attention: padding changes all logits of its row. Expected: keys of zero too. A text without padding is the
control. Found by `right-padding` and `padding-leak`."""

import torch
from performer_pytorch import PerformerLM

torch.manual_seed(0)
sizes = {"num_tokens": 64, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
model = PerformerLM(**sizes, generalized_attention=True).eval()
tokens = torch.randint(64, (1, 12))
with torch.no_grad():
    alone = model(tokens, mask=torch.ones(1, 12).bool())
    for count in (0, 4, 12):
        padded = torch.nn.functional.pad(tokens, (0, count))
        mask = torch.arange(12 + count)[None] < 12
        print(
            f"{count} padding tokens change the logits by {(model(padded, mask=mask)[:, :12] - alone).abs().max():.1e}"
        )
