"""Text at the two ends of a stream of token ids: a model's vocabulary and chat template, by llama.cpp.

For callers: the nodes and the head know token ids only. Everything here blocks for about a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from node_stub.llama_server import LlamaServer, ServerSettings

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# The whole model is loaded, for llama.cpp's server knows no less; but its weights stay on disk until used.
_LIGHT_WINDOW_TOKENS = 64


class Vocabulary:
    """The vocabulary of a GGUF file.

    Raises LlamaUnavailableError; its calls raise LlamaCallError and LlamaGoneError.
    """

    def __init__(self, model_file: Path) -> None:
        settings = ServerSettings(model_file, 1, _LIGHT_WINDOW_TOKENS, threads=1, warm_up=False)
        self._server = LlamaServer(settings)
        self._caller = self._server.caller()

    def close(self) -> None:
        self._caller.close()

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._server.eos_token_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; markers such as `<|im_end|>` are taken as the tokens they stand for."""
        return self._caller.tokenize(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of these; bytes that make no character become U+FFFD."""
        return str(self._caller.post("/detokenize", {"tokens": list(token_ids)})["content"])

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (each message a role and content) up to where the answer begins."""
        reply = self._caller.post("/apply-template", {"messages": list(messages)})
        return self.encode(str(reply["prompt"]))


class TextStream:
    """The text of an answer as its tokens come. A character is given out when its last token is there."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._held: list[int] = []

    def take(self, token_ids: Sequence[int]) -> str:
        """The text that these complete; tokens that end an answer have none."""
        self._held += [each for each in token_ids if each not in self._vocabulary.end_token_ids]
        text = self._vocabulary.decode(self._held)
        if text.endswith(_UNFINISHED):
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """What is left, when nothing more comes."""
        text = self._vocabulary.decode(self._held)
        self._held.clear()
        return text
