"""Whatever comes, in whatever order: only the newest epoch writes, and a context is what was appended."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node_stub.rules import (
    Admission,
    Append,
    Assign,
    Code,
    Generate,
    Limits,
    Model,
    NodeRules,
    Owner,
    Refusal,
    Stopped,
    blocks_of,
    context_crc32,
    term_of,
)

sessions = st.sampled_from(["a", "b"])
epochs = st.builds(lambda term, n: term << 32 | n, st.integers(1, 2), st.integers(1, 3))
ids = st.integers(1, 6)
lists = st.lists(st.integers(0, 99), max_size=20)
LEASE_MS = 100


class Node(RuleBasedStateMachine):
    """A plain model beside the rules: per session the epoch, the context, and which runs live."""

    def __init__(self) -> None:
        super().__init__()
        model = Model("m", vocab_size=90, max_context_tokens=50)
        self.node = NodeRules([model], Limits(max_sessions=2, default_lease_ms=LEASE_MS))
        self.now_ms = 0
        self.epoch: dict[str, int] = {}
        self.context: dict[str, list[int]] = {}
        self.fenced: set[str] = set()
        self.leases: dict[Owner, int] = {}
        self.barred: dict[str, tuple[int, int]] = {}
        self.fenced_ms: dict[str, int] = {}
        self.last_id: dict[str, int] = {}
        self.runs: set[tuple[str, int, str]] = set()
        self.started: set[tuple[str, int, str]] = set()

    def owner(self, epoch: int) -> Owner:
        return Owner("f", "h", term_of(epoch))

    def settle(self) -> None:
        for owner, end_ms in list(self.leases.items()):
            if end_ms <= self.now_ms:
                del self.leases[owner]
                lost = {s for s, e in self.epoch.items() if self.owner(e) == owner} - self.fenced
                self.fenced |= lost
                self.fenced_ms.update(dict.fromkeys(lost, self.now_ms))

    def judge_id(self, session: str, epoch: int, command_id: int) -> None:
        """The command's id counts when it came to a live session under its epoch, whatever the answer."""
        if self.epoch.get(session) == epoch and session not in self.fenced:
            self.last_id[session] = max(command_id, self.last_id[session])

    def stop_dead_runs(self) -> None:
        for effect in self.node.take_effects():
            if isinstance(effect, Stopped):
                self.runs.remove((effect.session_id, effect.epoch, effect.generation_id))

    @rule(session=sessions, epoch=epochs, command_id=ids)
    def assign(self, session: str, epoch: int, command_id: int) -> None:
        before = self.node.holdings()
        reply = self.node.assign(Assign(session, epoch, command_id, "f", "h", "m"), self.now_ms)
        self.settle()
        if reply is None and not (session in self.epoch and epoch == self.epoch[session]):
            barred, until_ms = self.barred.pop(session, (0, 0))
            assert self.now_ms >= until_ms or epoch > barred
            assert epoch > self.epoch.get(session, 0)
            self.epoch[session], self.context[session] = epoch, []
            self.last_id[session] = command_id
            self.fenced.discard(session)
            self.leases[self.owner(epoch)] = self.now_ms + LEASE_MS
        elif reply is not None and session not in self.fenced:
            assert reply.code in (Code.STALE_EPOCH, Code.REPLAYED, Code.FENCED)
            assert len(self.node.holdings()) == len(before)
        self.stop_dead_runs()

    @rule(session=sessions, epoch=epochs, command_id=ids, base=st.integers(0, 30), tokens=lists)
    def append(self, session: str, epoch: int, command_id: int, base: int, tokens: list[int]) -> None:
        command = Append(session, epoch, command_id, base, tokens)
        reply = self.node.append(command, self.now_ms)
        self.settle()
        if reply is None:
            assert self.epoch[session] == epoch
            assert session not in self.fenced
            if command_id > self.last_id[session]:
                self.context[session] = self.context[session][:base] + tokens
            else:
                assert command_id == self.last_id[session]
        self.judge_id(session, epoch, command_id)
        self.stop_dead_runs()

    @rule(session=sessions, epoch=epochs, command_id=ids, generation=st.sampled_from("gh"), lie=st.booleans())
    def generate(self, session: str, epoch: int, command_id: int, generation: str, lie: bool) -> None:
        context = [*self.context.get(session, []), *([1] if lie else [])]
        crc = context_crc32(context)
        command = Generate(session, epoch, command_id, generation, len(context), crc, 5)
        reply = self.node.generate(command, self.now_ms)
        self.settle()
        if isinstance(reply, Admission):
            assert not lie
            assert self.epoch[session] == epoch
            assert session not in self.fenced
            assert list(reply.prompt_token_ids) == context
            assert (session, epoch, generation) not in self.started
            self.started.add((session, epoch, generation))
            self.runs.add((session, epoch, generation))
        else:
            assert isinstance(reply, Refusal)
        self.judge_id(session, epoch, command_id)
        self.stop_dead_runs()

    @rule(session=sessions, epoch=epochs)
    def revoke(self, session: str, epoch: int) -> None:
        reply = self.node.revoke(session, epoch, self.now_ms)
        self.settle()
        if reply is None or reply.code == Code.UNKNOWN_SESSION:
            assert epoch >= self.epoch.pop(session, 0)
            self.context.pop(session, None)
            self.fenced.discard(session)
            old, until_ms = self.barred.get(session, (0, 0))
            barred = max(epoch, old) if self.now_ms < until_ms else epoch
            self.barred[session] = (barred, self.now_ms + 2 * LEASE_MS)
        else:
            assert epoch < self.epoch[session]
        self.stop_dead_runs()

    @rule(step_ms=st.sampled_from([0, 20, 90, 300, 1500]))
    def pass_time(self, step_ms: int) -> None:
        self.now_ms += step_ms

    @rule(term=st.integers(1, 2))
    def renew(self, term: int) -> None:
        owner = Owner("f", "h", term)
        renewed = self.node.renew_lease(owner, LEASE_MS, self.now_ms)
        self.settle()
        assert renewed == (owner in self.leases)
        if renewed:
            self.leases[owner] = self.now_ms + LEASE_MS
        self.stop_dead_runs()

    @rule(session=sessions, epoch=epochs, generation=st.sampled_from("gh"))
    def cancel(self, session: str, epoch: int, generation: str) -> None:
        outcome = self.node.cancel(session, epoch, generation, self.now_ms)
        self.settle()
        self.stop_dead_runs()
        assert outcome.was_running == ((session, epoch, generation) in self.runs)
        if outcome.refusal is None:
            self.started.add((session, epoch, generation))
        self.node.ended(session, epoch, generation)
        self.runs.discard((session, epoch, generation))

    @invariant()
    def only_live_runs_of_the_newest_epoch_may_speak(self) -> None:
        self.settle()
        self.node.expire(self.now_ms)
        for session in self.fenced - {h.session_id for h in self.node.holdings()}:
            assert self.now_ms >= self.fenced_ms[session] + 2 * LEASE_MS
            self.fenced.discard(session)
            del self.epoch[session], self.context[session]
        for session, epoch in {(s, e) for s, e, _ in self.started}:
            allowed = self.node.judge_emission(session, epoch, self.now_ms) is None
            assert allowed == (self.epoch.get(session) == epoch and session not in self.fenced)
        self.stop_dead_runs()
        assert self.node.active_runs == len(self.runs)

    @invariant()
    def contexts_equal_the_model_and_blocks_are_counted(self) -> None:
        live = {h.session_id: h for h in self.node.holdings() if not h.fenced}
        assert live.keys() == self.epoch.keys() - self.fenced
        for session, holding in live.items():
            assert holding.epoch == self.epoch[session]
            assert list(self.node.context_of(session)) == self.context[session]
        lengths = [len(self.context[session]) for session in live]
        assert self.node.context_blocks == sum(map(blocks_of, lengths))


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
