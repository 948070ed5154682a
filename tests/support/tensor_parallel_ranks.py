"""Runs tensor-parallel models on several processes, as torchrun starts them. The processes are forks: torch is imported
once. Arguments: world size, output directory, model directories. Each rank writes its logits and generated tokens.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.generate import Engine, EngineConfig
from cutaway.generate.engine.workers import run_on_rank_0
from cutaway.model.parallel.process_group import join_processes

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [12]]
MEASURED = ("dense", "gqa", "moe", "mla")
"""Models that are compared with their size estimate."""
SAMPLED = ("dense", "gqa", "moe", "mla", "encoder-decoder")
"""Models with sampled completions; the others differ from these in layers only, which greedy completions compare."""
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "logprobs": 2, "repetition_penalty": 1.2, "cache_implementation": "paged"},
]
MORE_SAMPLING: list[dict[str, Any]] = [{"draft_model": "ngram"}, {"beams": 2}, {"kv_cache_dtype": torch.int8}]
"""Further ways to generate, for one model."""


def compute_outputs(directory: Path, size: int) -> dict[str, torch.Tensor]:
    """Logits of a batch with padding, and the tokens of greedy and of sampled completions."""
    checkpoint = ct.load(directory, tensor_parallel_size=size, dtype=torch.float32)
    model: Any = checkpoint.model
    tokens = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    with torch.no_grad():
        logits = model(tokens, tokens, mask) if len(model.stacks) == 2 else model(tokens, mask)
    outputs = {"logits": logits[mask]}
    if directory.name == "gqa":
        outputs["logits.of_hidden_states"] = compute_logits(directory, size)
    sampling = SAMPLING[: 2 if directory.name in SAMPLED else 1] + (MORE_SAMPLING if directory.name == "gqa" else [])
    for i, params in enumerate(sampling if "decoder" in model.stacks else []):
        completions = ct.generate(checkpoint, PROMPTS, max_new_tokens=4, ignore_eos=True, max_num_seqs=2, **params)
        outputs[f"tokens.{i}"] = torch.tensor([completion.tokens for completion in completions])
    return outputs


def measure_rank(directory: Path, size: int) -> dict[str, torch.Tensor]:
    """Bytes of this rank's weights and cache slots, and the all-reduces of a decode step of one sequence."""
    model: Any = ct.load(directory, tensor_parallel_size=size, dtype=torch.float32).model
    ranks, traffic = model.tensor_parallel, []
    all_reduce = ranks.all_reduce
    ranks.all_reduce = lambda x: (traffic.append(x.nbytes), all_reduce(x))[1]
    cache = model.new_cache(1, 9)
    with torch.no_grad():
        model(torch.arange(8)[None], cache=cache)
        traffic.clear()
        model(torch.tensor([[1]]), cache=cache)
    ranks.all_reduce = all_reduce
    weights = {id(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}
    kv_bytes = sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers)
    return {
        "weight_bytes": torch.tensor(sum(weights.values())),
        "kv_bytes": torch.tensor(kv_bytes),
        "all_reduce_bytes": torch.tensor(traffic),
    }


def compute_logits(directory: Path, size: int) -> torch.Tensor:
    """Logits of hidden states that only rank 0 has."""
    model: Any = ct.load(directory, tensor_parallel_size=size, dtype=torch.float32).model
    x = torch.randn(3, model.config.d_model, generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        engine = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=8))
        with torch.no_grad():
            return engine.model_runner.compute_logits(x)

    return run_on_rank_0(model, run)


def run_rank(rank: int, size: int, output: Path, directories: list[Path]) -> None:
    if size > 1:
        torch.set_num_threads(1)
        store = dist.FileStore(str(output / "store"), size)  # type: ignore[attr-defined]
        join_processes(torch.device("cpu"), store=store, rank=rank, world_size=size)
    for directory in directories:
        try:
            save_file(compute_outputs(directory, size), output / f"{directory.name}.{size}.{rank}.safetensors")
            if size > 1 and directory.name in MEASURED:
                save_file(measure_rank(directory, size), output / f"{directory.name}.measured.{rank}.safetensors")
            if size > 1 and directory.name == "gqa":  # an error of rank 0 is raised on all ranks
                ct.generate(ct.load(directory, tensor_parallel_size=size), [[1]], max_new_tokens=2, weight_bits=8)
        except CutawayError as error:
            (output / f"{directory.name}.{size}.{rank}.json").write_text(json.dumps(str(error)))


def main() -> int:
    size, output, directories = int(sys.argv[1]), Path(sys.argv[2]), [Path(path) for path in sys.argv[3:]]
    pids = []
    for rank in range(size):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                run_rank(rank, size, output, directories)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    return max(os.waitpid(pid, 0)[1] for pid in pids) and 1


if __name__ == "__main__":
    sys.exit(main())
