"""One run in a simulated engine: its draws, and what is kept of them for a head that comes back."""

from __future__ import annotations

from fleet_service.domain.commands import Phase
from node_stub import rules
from node_stub.reference import StubModel, absorb, effective_seed, initial_state, next_token
from tests.sim.network import RunKey, RunPort, Step
from tests.sim.nodes import ArmedFault


class EngineRun:
    """One run. `port` is where its messages go, None while its head is away.

    `resumes`: what was drawn is kept, the newest `buffer_tokens` of it, until acknowledged.
    """

    __slots__ = (
        "_buffer_tokens",
        "_kept",
        "_untold",
        "admission",
        "deadline_ms",
        "eos",
        "fault",
        "last",
        "left",
        "model",
        "phase",
        "port",
        "resumes",
        "sent",
        "stalled",
        "state",
        "tail",
    )

    def __init__(
        self,
        admission: rules.Admission,
        model: StubModel,
        port: RunPort,
        now_ms: int,
        fault: ArmedFault | None,
        *,
        resumes: bool,
        buffer_tokens: int,
    ) -> None:
        self.admission = admission
        self.model = model
        self.port: RunPort | None = port
        self.deadline_ms = now_ms + (admission.max_wall_ms or 10**12)
        seed = effective_seed(admission.sampling.temperature, admission.sampling.seed)
        self.state = absorb(initial_state(model, seed), admission.prompt_token_ids)
        self.sent = 0
        self.eos = False
        self.stalled = False
        self.fault = fault
        self.tail: list[int] = []
        self.phase: Phase | None = None
        self.last: Step | None = None  # its end, once it has ended
        self.resumes = resumes
        self.left = 0  # how often its head has gone, so that a timer knows whether it still holds
        self._buffer_tokens = buffer_tokens
        self._kept: list[int] = []
        self._untold = 0

    @property
    def key(self) -> RunKey:
        return self.admission.session_id, self.admission.epoch, self.admission.generation_id

    @property
    def done(self) -> bool:
        return self.eos or self.sent >= self.admission.max_new_tokens

    @property
    def next_index(self) -> int:
        """Index of the next token to draw."""
        return self.admission.first_index + self.sent

    @property
    def overflows(self) -> bool:
        """More was drawn while its head was away than is kept."""
        return self.port is None and self._untold > self._buffer_tokens

    def draw(self, count: int) -> list[int]:
        """The next tokens, at most `count`, ending with EOS or the budget."""
        drawn: list[int] = []
        while len(drawn) < count and not self.done:
            token = next_token(self.model, self.state)
            self.state = absorb(self.state, (token,))
            drawn.append(token)
            self.sent += 1
            self.eos = token == self.model.eos_token_id
        if self.resumes:
            self._kept += drawn
            self._untold = self._untold + len(drawn) if self.port is None else 0
            del self._kept[: -self._buffer_tokens]
        return drawn

    def lose_one(self) -> None:
        """Draw a token that is never sent; what comes before it cannot be sent again."""
        self.draw(1)
        self._kept.clear()

    def has_index(self, index: int) -> bool:
        """Whether what comes from `index` on is kept."""
        return self.next_index - len(self._kept) <= index <= self.next_index

    def kept_from(self, index: int) -> list[int]:
        """What was drawn from `index` on."""
        return self._kept[len(self._kept) - (self.next_index - index) :]

    def acknowledge(self, index: int) -> bool:
        """Forget what comes before `index`. False: it was not drawn yet."""
        if index > self.next_index:
            return False
        del self._kept[: max(0, index - (self.next_index - len(self._kept)))]
        return True
