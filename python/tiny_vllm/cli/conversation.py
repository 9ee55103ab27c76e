"""A conversation with a model: its messages, and one answer after the other."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tiny_vllm.chat_template import check_messages
from tiny_vllm.cli.options import SAMPLING
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error, InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.plain_files import write_whole
from tiny_vllm.requests import Stream
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.tokenizer import load_generation_config

MAX_TOKENS = 512
TEMPERATURE = 0.7  # where the model names none: at vLLM's 1.0 a small one talks nonsense
_MAX_FILE_BYTES = 64_000_000


class Unanswered(Error):
    """There is no answer, for a reason that is nobody's mistake. The conversation is as it was before."""


class DoesNotFit(Unanswered):
    """The conversation has more tokens than one request may have."""


class TooLong(Unanswered):
    """The message has too many tokens, whatever was said before it."""


@dataclass(frozen=True)
class Turn:
    """The figures of one answer."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: their keys and values were still there
    new_tokens: int
    first_seconds: float  # until the first token
    seconds: float  # from there on
    finish_reason: str | None  # None: it was stopped

    def __str__(self) -> str:
        share = 100 * self.cached_tokens / self.prompt_tokens
        decodes = max(self.new_tokens - 1, 0)  # the first token belongs to the prefill
        speed = f", {decodes / self.seconds:.1f} tok/s" if decodes and self.seconds > 0 else ""
        return (
            f"{self.prompt_tokens} prompt tokens, {self.cached_tokens} of them ({share:.0f}%) from the "
            f"prefix cache; {self.new_tokens} new tokens, first after {self.first_seconds:.2f} s{speed}"
        )


class Conversation:
    """What was said so far. An answer that fails leaves it as it was, and the message in `unsent`.

    Raises:
        InvalidRequestError: the model has no chat template, or a parameter is out of range.
    """

    def __init__(self, engine: Engine, given: dict[str, Any], system: str | None = None) -> None:
        """`given` are parameters of sampling by name; the model's own generation config has the others."""
        if engine.tokenizer is None or not engine.tokenizer.chat_templates:
            raise InvalidRequestError(
                f"{engine.model_folder} has no chat template, so it cannot chat; "
                "`tiny-vllm run` goes on with a text"
            )
        self.engine = engine
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.unsent: str | None = None
        self.last: Turn | None = None
        self.room: int = engine.info()["max_total_len"]  # tokens, the answer's too
        of_the_model = engine.default_sampling_params()
        self.defaults = {name: getattr(of_the_model, name) for name in SAMPLING}
        self.defaults["max_tokens"] = MAX_TOKENS
        wanted = load_generation_config(engine.model_folder)
        if wanted.temperature is None:
            self.defaults["temperature"] = TEMPERATURE
        # Where each default comes from.
        self.sources = {
            name: "the model's" if getattr(wanted, name, None) is not None else "default" for name in SAMPLING
        }
        self.sources |= {name: "flag" for name, value in given.items() if value != self.defaults[name]}
        self.defaults |= given
        self.sampling = dict(self.defaults)
        self._tokenizer = engine.tokenizer
        self._stream: Stream | None = None
        self._stopped = False
        self._params()

    def set(self, name: str, value: Any) -> None:
        """Raises InvalidRequestError, and changes nothing, when the value is out of range."""
        before = self.sampling[name]
        self.sampling[name] = value
        try:
            self._params()
        except InvalidRequestError:
            self.sampling[name] = before
            raise

    def _params(self) -> SamplingParams:
        params = SamplingParams(**self.sampling)
        if params.seed is None:
            params.seed = secrets.randbits(63)  # another answer each time, also to the same question
        return params

    # ---- answers -------------------------------------------------------------------------------------------

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Adds the message and the answer to it; `show` gets the answer piece by piece.

        Raises:
            Error: there is no answer. The message is then in `unsent`, for :meth:`retry`; not one that is too
                long by itself.
        """
        self.unsent = text
        try:
            self._answer([*self.messages, {"role": "user", "content": text}], show)
        except TooLong:
            self.unsent = None
            raise

    def retry(self, show: Callable[[str], None]) -> None:
        """Answers the last message again, or sends the one that failed."""
        if self.unsent is not None:
            self.ask(self.unsent, show)
            return
        messages = self.messages
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise Unanswered("there is no message yet that could be answered again")
        self._answer(messages, show)

    def stop(self) -> None:
        """Ends the answer that is coming, if one is. A signal handler may call it."""
        self._stopped = True
        stream = self._stream
        if stream is not None:
            stream.close()

    def _answer(self, messages: list[dict[str, Any]], show: Callable[[str], None]) -> None:
        self._stopped = False
        prompt = self._prompt(messages)
        stream = cast(Stream, self.engine.start_stream(prompt, self._params()))
        self._stream = stream
        output: RequestOutput | None = None
        text = ""
        try:
            if self._stopped:  # before there was a stream to close
                stream.close()
            for output in stream:
                show(output.outputs[0].text[len(text) :])
                text = output.outputs[0].text
                if self._stopped:
                    break
        finally:
            self._stream = None
            stream.close()
        if output is not None and output.outputs[0].finish_reason == "error":
            raise Error(str(output.outputs[0].stop_reason))
        if output is None or (self._stopped and not text):
            raise Unanswered("stopped before the answer began")
        self.last = _figures(output)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self.unsent = None

    def _prompt(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        text, ids = self._tokens(messages)
        if len(ids) >= self.room:
            limit = self.engine.info()["max_model_len"]
            what = "max_model_len" if self.room == limit else f"the KV cache; max_model_len is {limit}"
            room = f"and there is room for {self.room} with the answer ({what})"
            alone = len(self._tokens(messages[-1:])[1])
            if alone >= self.room:
                system = "" if self.system is None else " with the system message"
                raise TooLong(
                    f"this message alone has {alone} tokens{system}, {room}: it can never be sent; shorten it"
                )
            raise DoesNotFit(f"the conversation has {len(ids)} tokens with this message, {room}")
        return {"prompt": text, "prompt_token_ids": ids}

    def _tokens(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        text = self._tokenizer.apply_chat_template(self._with_system(messages))
        # The template writes the begin token itself.
        return text, self._tokenizer.encode(text, add_special_tokens=False)

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]

    # ---- what was said -------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets all messages. The system message stays, and so does one that could not be sent."""
        self.messages, self.last = [], None

    def undo(self) -> str | None:
        """Forgets the last message of the user and the answer to it; returns that message."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            return None
        text = str(self.messages[users[-1]]["content"])
        self.messages = self.messages[: users[-1]]
        return text

    def save(self, file: Path) -> bool:
        """Writes the messages as a JSON list. Whether it replaced a conversation.

        Raises Error; another kind of file is not overwritten.
        """
        replaced = os.path.exists(file)  # file.exists() raises when the name is too long
        if replaced:
            try:
                _read_messages(file)
            except Error:
                raise Error(f"{file} exists and is not a saved conversation; give another name") from None
        text = json.dumps(self._with_system(self.messages), ensure_ascii=False, indent=2) + "\n"
        try:
            write_whole(file, text)
        except OSError as error:
            raise Error(f"{file} cannot be written: {error.strerror}") from None
        except UnicodeEncodeError:
            raise Error("a message holds half of a surrogate pair, which cannot be written") from None
        return replaced

    def load(self, file: Path) -> None:
        """Takes the messages of a file in place of these. Raises Error, and then nothing has changed."""
        messages = _read_messages(file)
        if messages:
            self._tokenizer.apply_chat_template(messages)  # raises if the template does not want them
        self.system = None
        if messages and messages[0]["role"] == "system":
            self.system = messages.pop(0)["content"]
        self.clear()
        self.messages, self.unsent = messages, None


def _figures(output: RequestOutput) -> Turn:
    times = output.metrics
    assert times is not None
    first = times.first_token_time or time.monotonic()
    return Turn(
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0,
        new_tokens=len(output.outputs[0].token_ids),
        first_seconds=first - times.arrival_time,
        seconds=(times.finished_time or time.monotonic()) - first,
        finish_reason=output.outputs[0].finish_reason,
    )


def _read_messages(file: Path) -> list[dict[str, Any]]:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise Error(f"{file} has more than {_MAX_FILE_BYTES} bytes, which is no conversation")
        value = json.loads(file.read_text(encoding="utf-8"))
        messages = check_messages(value) if value != [] else []
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}") from None
    except InvalidRequestError as error:
        raise Error(f"{file} is not a list of messages: {error}") from None
    except (ValueError, RecursionError):
        raise Error(f"{file} is not JSON") from None
    for message in messages:
        if not isinstance(message.get("content"), str):
            raise Error(f"{file} has a message whose content is not text")
    return messages
