"""Fetches a model folder from the Hugging Face Hub: only the files that are needed, kept in the Hub's own
cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    for private and gated models; `cache_dir` defaults to the Hub's cache. An interrupted download goes on
    where it stopped, and without a network a model that is in the cache still loads. `local_files_only` asks
    for the cache alone.

    Raises ModelLoadError that says what failed and what to do: no such model or revision, gated, wrong token,
    no network, or a model without safetensors weights.
    """
    # Imported here: it takes a third of a second, and a model in a folder does not need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"{model_id} (revision {revision})" if revision else model_id
    try:
        folder = Path(
            snapshot_download(
                model_id,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=bool(local_files_only),
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except GatedRepoError:
        reason = (
            f"is gated: accept its licence at {constants.ENDPOINT}/{model_id}, then give a token with access "
            "to it (HF_TOKEN, or token=)"
        )
    except RevisionNotFoundError:
        reason = "exists, but not in this revision; check the name of the branch, tag or commit"
    except RepositoryNotFoundError as error:
        reason = f"was not found on {constants.ENDPOINT}, nor as a local folder; check the spelling" + (
            ". If the model is private, give a token that may read it (HF_TOKEN, or token=)"
            if _status(error) == 401
            else ""
        )
    except LocalEntryNotFoundError as error:
        if local_files_only or constants.HF_HUB_OFFLINE:
            reason = (
                "is not (wholly) in the cache, and fetching is forbidden (local_files_only or HF_HUB_OFFLINE)"
            )
        else:
            reason = (
                f"is not (wholly) in the cache, and {constants.ENDPOINT} cannot be reached; check the "
                f"network ({_first_line(error.__cause__ or error)})"
            )
    except HFValidationError as error:
        reason = f"is neither a folder nor a name that the Hub could have: {_first_line(error)}"
    except HfHubHTTPError as error:
        status = _status(error)
        advice = {
            401: "the token is not valid; make a new one and give it as HF_TOKEN",
            403: "the token has no access to this model; accept its licence, or use another token",
        }.get(status or 0, "try again later")
        reason = f"could not be fetched: the Hub answered {status}; {advice} ({_first_line(error)})"
    except (
        Exception
    ) as error:  # connection lost half-way, disk full, ...: the type differs between library versions
        reason = (
            f"could not be fetched: {type(error).__name__}: {_first_line(error)}; call again, and the "
            "download goes on where it stopped"
        )
    else:
        _check_complete(folder, what)
        return folder
    raise ModelLoadError(f"model {what} {reason}") from None


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
