"""Export a policy as a Hugging Face directory, for transformers, vLLM and others.

    scalerl export --checkpoint=runs/tiny --out=DIR [--dtype=bfloat16 | --adapter]

The checkpoint is a run directory (its newest is taken), one of a run's checkpoints, a
Hugging Face directory or a GGUF file.  The directory also gets the tokenizer, its chat
template and its EOS tokens.  With `--adapter` only the factors of a run with
`model.lora.rank` are written, in the format of `peft`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.formats.bounded import MOST_WHOLE, read_bytes
from scalerl_jax.formats.model_files import local_directory, local_path
from scalerl_jax.formats.reading import is_hub_id, require_local
from scalerl_jax.model.adapter_files import save_factors
from scalerl_jax.model.hugging_face import is_below_language_model
from scalerl_jax.model.saving import TOKENIZER_FILES, check_place, save_params
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.wiring.loading import load_adapter, load_model, run_settings


def export(checkpoint: str | Path, out: str | Path, *, dtype: str = "") -> None:
    """Write the policy in `checkpoint` to the directory `out`.

    `dtype` is a dtype's name; empty: the one in which the policy was sampled or saved.

    Raises:
        ValueError: the checkpoint is missing or broken, or `out` holds other files, or
            the weights that the run began with.
        RuntimeError: `out` cannot be written.
    """
    settings = _check_out(checkpoint, out)
    model = load_model(checkpoint, dtype=dtype, require_finite=True)
    source = checkpoint
    if settings is not None:
        source = settings.data.tokenizer or settings.model.checkpoint
    save_params(
        out,
        model.params,
        model.arch,
        dtype=model.dtype,
        companions=tokenizer_files(source, model.tokenizer),
        eos_token_id=list(model.tokenizer.eos_ids),
    )


def export_adapter(checkpoint: str | Path, out: str | Path) -> None:
    """Write the low-rank factors of the run in `checkpoint` to the directory `out`.

    Raises:
        ValueError: the checkpoint has no factors or is broken, or `out` holds other
            files, or the base.
        RuntimeError: `out` cannot be written.
    """
    _check_out(checkpoint, out)
    adapter = load_adapter(checkpoint)
    model = adapter.config.model
    base, revision = name_base(model.checkpoint)
    save_factors(
        out,
        adapter.factors,
        adapter.arch,
        model.lora,
        base=base,
        revision=revision,
        nested=bool(base) and is_below_language_model(model.checkpoint),
        digest=adapter.digest,
        base_dtype=model.param_dtype,
    )


def _check_out(checkpoint: str | Path, out: str | Path) -> Config | None:
    """Return the settings of the run, None without one; refuse to replace its base."""
    check_place(out)
    settings = run_settings(checkpoint)
    base, place = settings.model.checkpoint if settings else "", Path(out)
    if base and place.exists() and (found := Path(base).expanduser()).exists():
        if found.samefile(place):
            raise ValueError(
                f"--out={out} holds model.checkpoint = {base!r} of the run, which an "
                f"export would replace; name another directory"
            )
    return settings


def name_base(checkpoint: str) -> tuple[str, str]:
    """Return a base's hub id and revision, or its whole path and "".

    By them the user of an adapter finds its base from any directory.
    """
    if is_hub_id(checkpoint):
        base, _, revision = checkpoint.partition("@")
        return base, revision
    return checkpoint and os.path.abspath(str(local_directory(checkpoint))), ""


def tokenizer_files(source: str | Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return a tokenizer's files, by name, in the form that transformers reads."""
    path, directory = local_path(source), local_directory(source)
    files = {
        name: read_bytes(file, most=MOST_WHOLE)
        for name in TOKENIZER_FILES
        if (file := directory / name).is_file()
    }
    if isinstance(path, Path) and path.is_file():
        files["tokenizer.json"] = read_bytes(path, most=MOST_WHOLE)
    # If no class is named, transformers uses the model family's, which rebuilds the
    # tokenizer by its own rules.
    made: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": tokenizer.decode_all([tokenizer.eos_ids[0]]),
        },
        "generation_config.json": {"eos_token_id": list(tokenizer.eos_ids)},
    }
    for name, values in made.items():
        files.setdefault(name, (json.dumps(values, indent=2) + "\n").encode())
    return files


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    parser = Parser(
        prog="python -m scalerl_jax.export",
        description="Export a policy as a Hugging Face directory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="run directory, a checkpoint of a run, Hugging Face directory, GGUF file",
    )
    parser.add_argument(
        "--out",
        required=True,
        help="directory to write; an earlier export in it is replaced",
    )
    parser.add_argument(
        "--dtype",
        default="",
        choices=("", "float32", "bfloat16"),
        help="dtype of the files; empty: as the policy was sampled or saved",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the low-rank factors, for peft, in float32",
    )
    options = parser.parse_args(arguments)
    if options.adapter and options.dtype:
        parser.error("--dtype is of merged weights; leave it out with --adapter")

    def write() -> None:
        require_local(options.out, flag="--out=")
        if options.adapter:
            export_adapter(options.checkpoint, options.out)
        else:
            export(options.checkpoint, options.out, dtype=options.dtype)
        to_stdout(f"wrote {options.out}\n")

    return answer(write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
