"""`cutaway convert`: convert checkpoints between Hugging Face, GGUF and cutaway formats."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cutaway.cli.json_output import print_json
from cutaway.cli.options import ADAPTER_HELP, JsonFlag, WeightDType, argument, option, source_argument
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.families.checkpoint import Checkpoint

OutputFormat = Literal["hf", "gguf", "cutaway"]
GGUFQuantization = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k", "q5_1", "q5_0", "q4_k_m", "q4_k", "q4_1", "q4_0"
]


def convert(
    source: Annotated[str, source_argument("Model directory, .gguf file or hub id.", metavar="SRC")],
    out: Annotated[Path | None, argument("Output path; without it, only the report is printed.", metavar="OUT")] = None,
    to: Annotated[OutputFormat, option("Output format.")] = "hf",
    family: Annotated[
        str | None, option("model_type of the written config, if several families fit the model.")
    ] = None,
    adapter: Annotated[str | None, option(f"{ADAPTER_HELP} It is merged into the weights.", metavar="DIR")] = None,
    adapter_only: Annotated[
        bool, option("Write the adapter without the model: in PEFT's format, or as a GGUF LoRA.", "--adapter-only")
    ] = False,
    dtype: WeightDType = None,
    quantization: Annotated[GGUFQuantization | None, option("Quantization of the weight matrices, for gguf.")] = None,
    verify: Annotated[bool, option("Compare activations with transformers, layer by layer.", "--verify")] = False,
    overwrite: Annotated[bool, option("Overwrite OUT.", "--overwrite")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Load a checkpoint, report on every tensor and config field, and write it in another format.

    Example: cutaway convert ./SmolLM2-135M out.gguf --to gguf --quantization q8_0

    Example: cutaway convert ./my-llama --verify

    Example: cutaway convert runs/lora merged

    Example: cutaway convert runs/lora lora.gguf --to gguf --adapter-only
    """
    _check_options(out, to, family, quantization, overwrite)
    if adapter_only and (out is None or to == "cutaway" or quantization or family):
        raise InputError("--adapter-only writes OUT with --to hf or --to gguf, without --family and --quantization")
    from cutaway.cli.model_loading import to_torch_dtype
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.families.load import load, read_adapter_base
    from cutaway.model.adapters.adapter_methods import describe_adapter

    with progress_bar("loading", quiet=as_json) as progress:
        checkpoint = load(source, adapters=adapter, dtype=to_torch_dtype(dtype), check_finite=True, progress=progress)
    has_adapter = checkpoint.model.active_adapter is not None
    if verify and has_adapter:
        raise InputError("--verify compares a model without adapters; verify the base model, or the merged directory")
    if adapter_only and not has_adapter:
        raise InputError(f"'{source}' has no adapter to write; pass one with --adapter DIR, or an adapter directory")
    assert checkpoint.load_report is not None
    data: dict[str, object] = {"report": checkpoint.load_report.to_dict()}
    lines = [str(checkpoint.load_report)]
    if (description := describe_adapter(checkpoint.model)) is not None:
        data["adapter"] = description
        lines.append(f"{description}{'' if adapter_only or out is None else ', merged into the weights'}")
    if out is not None:
        with progress_bar("writing", quiet=as_json) as progress:
            if adapter_only:
                base = read_adapter_base(source) if adapter is None else source
                output_path = _write_adapter(checkpoint, out, to, base, overwrite)
                if adapter is None and to == "hf":
                    _write_tokenizer(checkpoint, output_path)
            elif to == "gguf":
                from cutaway.families.gguf.load_save import save_gguf

                output_path = save_gguf(checkpoint, out, quantization=quantization, overwrite=overwrite)
            else:
                from cutaway.families.save import save

                family = "cutaway" if to == "cutaway" else family
                output_path = save(checkpoint, out, family=family, overwrite=overwrite, progress=progress)
        data["written"] = str(output_path)
        lines.append(f"written: {output_path}")
        if quantization is not None:
            data["matrices"], description = _count_formats(output_path, quantization)
            lines.append(description)
    verified = True
    if verify:
        del checkpoint
        from cutaway.families.verify import verify as verify_checkpoint

        verification = verify_checkpoint(source)
        data["verification"], verified = verification.to_dict(), verification.ok
        lines.append(str(verification))
    if as_json:
        print_json(data)
    else:
        from rich.console import Console

        Console(soft_wrap=True, highlight=False).print("\n".join(lines), markup=False)
    if not verified:
        raise typer.Exit(1)


def _count_formats(path: Path, quantization: str) -> tuple[dict[str, int], str]:
    """Number of matrices of a GGUF file in each format, and a line that says so."""
    from cutaway.families.gguf.file_format import GGUFFile

    infos = [info for info in GGUFFile(path).tensor_infos.values() if len(info.shape) > 1]
    formats = dict(Counter(info.storage_type for info in infos).most_common())
    line = f"matrices: {', '.join(f'{count} in {name}' for name, count in formats.items())}"
    block = 256 if "_k" in quantization else 32
    uneven = sum(info.shape[-1] % block > 0 for info in infos) if quantization.startswith("q") else 0
    if uneven:
        line += f" ({uneven} have columns that are not a multiple of {block}, so that {quantization} is not possible)"
    return formats, line


def _write_adapter(checkpoint: "Checkpoint", out: Path, to: OutputFormat, base: str | None, overwrite: bool) -> Path:
    """Write the adapter of a checkpoint alone. `base` is the source of the base model, if it is known."""
    if to == "gguf":
        from cutaway.families.gguf.adapter_file import save_adapter_gguf

        return save_adapter_gguf(checkpoint, out, overwrite=overwrite)
    from cutaway.families.peft_format import save_adapter

    is_path = base is not None and Path(base).expanduser().exists()
    return save_adapter(checkpoint, out, base=Path(str(base)).expanduser().resolve() if is_path else base)


def _write_tokenizer(checkpoint: "Checkpoint", out: Path) -> None:
    """Write the tokenizer and the generation config beside an adapter, which may have been trained with its own."""
    from cutaway.families.load import GENERATION_CONFIG_NAME
    from cutaway.user_files import write_text_atomically

    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(out)
    if checkpoint.generation_config:
        write_text_atomically(out / GENERATION_CONFIG_NAME, json.dumps(checkpoint.generation_config, indent=2) + "\n")


def _check_options(
    out: Path | None, to: OutputFormat, family: str | None, quantization: str | None, overwrite: bool
) -> None:
    """Raise for invalid combinations of options. This is called before the checkpoint is loaded."""
    from cutaway.families import families

    if quantization is not None and to != "gguf":
        raise InputError("--quantization requires --to gguf; for other formats use --dtype")
    if family is not None and to != "hf":
        raise InputError("--family requires --to hf; leave it out")
    if family is not None and family not in families():
        raise InputError(f"'{family}' is not a supported family; use one of {', '.join(families())}")
    if out is None and (family or quantization):
        raise InputError("--family and --quantization apply to the output; pass OUT too")
    if out is not None and not overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise InputError(f"'{out}' exists; pass another path, or --overwrite")
    if to == "gguf" and out is not None and out.suffix != ".gguf":
        raise InputError(f"'{out}' does not end in .gguf, but the gguf format is a single .gguf file; rename it")
