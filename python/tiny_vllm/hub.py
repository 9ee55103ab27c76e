"""Fetches a model from the Hugging Face Hub: only the files that are needed, into the Hub's own cache."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .cache import console
from .errors import ModelLoadError

# What the engine reads. In these patterns * also matches /, hence the second list.
_WANTED = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
# The same weights once more: in Meta's and Mistral's own formats, in half precision, in other folders; and
# adapters.
_UNWANTED = ["*/*.safetensors*", "consolidated*", "*.fp16.safetensors", "adapter_*"]


def download(
    model_id: str,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool | None = None,
) -> Path:
    """The folder of a Hub model, downloaded if it is not in the cache yet.

    `revision` is a branch, tag or commit; `token` (default: HF_TOKEN, or the one saved by `hf auth login`) is
    for private and gated models; `cache_dir` defaults to the Hub's cache; `local_files_only` asks for the
    cache alone. A connection that breaks is taken up where it broke, after a stop only the files that are not
    complete are fetched again, and without a network a model that is in the cache still loads.

    Raises ModelLoadError that says what failed and what to do: no such model or revision, gated, wrong token,
    no network, or a model without safetensors weights.
    """
    # Imported here: it takes a third of a second, and a model in a folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    stopped = threading.Event()
    bars: list[Bar] = []

    class Bar(tqdm):
        """The Hub's own bar, but only in a terminal, and gone when done."""

        def __init__(self, *args: Any, **options: Any) -> None:
            how = {"leave": False} if console.is_interactive else {"disable": True}
            super().__init__(*args, **{**options, **how})  # type: ignore[no-untyped-call]
            bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            if stopped.is_set():
                raise InterruptedError  # a thread of the library would else fetch its file to the end
            return super().update(n)  # type: ignore[no-any-return]

    what = f"{model_id} (revision {revision})" if revision else model_id
    try:
        # In a thread, because the library answers to Ctrl-C only when the files that it fetches are whole.
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(
                snapshot_download,
                model_id,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=bool(local_files_only),
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                tqdm_class=Bar,
            )
            try:
                folder = Path(work.result())
            except BaseException:
                stopped.set()
                raise
    except (
        Exception
    ) as error:  # of many kinds, also of the library underneath, which differs between versions
        raise ModelLoadError(f"model {what} {_explain(error, model_id, bool(local_files_only))}") from None
    finally:
        for bar in reversed(bars):  # the library leaves some open, and the cursor between them
            bar.close()
    _check_complete(folder, what)
    return folder


def _explain(error: Exception, model_id: str, local_files_only: bool) -> str:
    """What went wrong with a download and what to do, in words that follow the model's name."""
    from huggingface_hub import constants, errors

    hub, status = constants.ENDPOINT, _status(error)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"is gated: accept its licence at {hub}/{model_id}, then give a token with access to it "
            "(HF_TOKEN, or token=)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "exists, but not in this revision; check the name of the branch, tag or commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "; if the model is private, give a token that may read it (HF_TOKEN, or token=)"
        advice = "check the spelling" + (private if status == 401 else "")
        return f"was not found on {hub}, nor as a local folder; {advice}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if local_files_only or constants.HF_HUB_OFFLINE:
            return "is not (wholly) in the cache, and local_files_only or HF_HUB_OFFLINE forbids fetching it"
        reason = _first_line(error.__cause__ or error)
        return (
            f"is no folder here and not (wholly) in the cache, and {hub} cannot be reached; check the name, "
            f"or the network ({reason})"
        )
    if isinstance(error, errors.HFValidationError):
        return f"is neither a folder nor a name that the Hub could have: {_first_line(error)}"
    advice = {
        401: "the token is not valid; make a new one and give it as HF_TOKEN",
        403: "the token has no access to this model; accept its licence, or use another token",
    }.get(status or 0, "call again later: files that are complete are not fetched again")
    answer = f"the Hub answered {status}" if status else type(error).__name__
    return f"could not be fetched: {answer}; {advice} ({_first_line(error)})"


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _check_complete(folder: Path, what: str) -> None:
    """Raises ModelLoadError when the repository, or what is cached of it, is not a whole model."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"model {what} has no config.json (in {folder}): not a model folder of Transformers"
        )
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelLoadError(f"{index}: has no 'weight_map' of tensors to files") from None
    elif any(folder.glob("*.safetensors")):
        return  # under another name; the loader takes what is there
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"model {what} has no {missing[0]} (in {folder}); only weights in safetensors files can be "
            "loaded. If the download was cut off, call again with a network"
        )
