"""The stub's model can be foretold, from any point on."""

from hypothesis import given
from hypothesis import strategies as st

from node_stub.reference import StubModel, effective_seed, reference_tokens

MODEL = StubModel("m")
TALKATIVE = StubModel("m", eos_per_mille=50)
tokens = st.lists(st.integers(0, 31_999), max_size=40)


@given(prompt=tokens, seed=st.integers(0, 2**64 - 1), n=st.integers(0, 60), data=st.data())
def test_a_run_taken_up_after_any_token_goes_on_as_the_undisturbed_one(
    prompt: list[int], seed: int, n: int, data: st.DataObject
) -> None:
    model = data.draw(st.sampled_from([MODEL, TALKATIVE]))
    whole = reference_tokens(model, seed, prompt, n)
    ended = bool(whole) and whole[-1] == model.eos_token_id
    k = data.draw(st.integers(0, len(whole) - 1 if ended else len(whole)))
    first = reference_tokens(model, seed, prompt, k)
    assert first == whole[:k]
    assert first + reference_tokens(model, seed, [*prompt, *first], n - k) == whole


@given(prompt=tokens, seed=st.integers(0, 1000))
def test_without_a_chance_of_eos_the_length_is_exact_and_ids_are_in_the_vocabulary(
    prompt: list[int], seed: int
) -> None:
    answer = reference_tokens(MODEL, seed, prompt, 50)
    assert len(answer) == 50
    assert all(0 <= token < MODEL.vocab_size and token != MODEL.eos_token_id for token in answer)


def test_eos_comes_about_as_often_as_configured_and_ends_the_answer() -> None:
    answers = [reference_tokens(TALKATIVE, 0, [n], 1000) for n in range(300)]
    assert all(answer[-1] == TALKATIVE.eos_token_id for answer in answers)
    mean = sum(map(len, answers)) / len(answers)
    assert 15 < mean < 25


def test_model_revision_seed_and_each_token_matter() -> None:
    base = reference_tokens(MODEL, 1, [5, 6, 7], 8)
    others = [
        reference_tokens(StubModel("other"), 1, [5, 6, 7], 8),
        reference_tokens(StubModel("m", revision="stub-2"), 1, [5, 6, 7], 8),
        reference_tokens(MODEL, 2, [5, 6, 7], 8),
        reference_tokens(MODEL, 1, [6, 5, 7], 8),
        reference_tokens(MODEL, 1, [5, 6, 7, 0], 8),
        reference_tokens(MODEL, 1, [4, 6, 7], 8),
    ]
    assert all(other != base for other in others)


def test_a_greedy_answer_does_not_depend_on_the_seed() -> None:
    assert effective_seed(0.0, 7) == effective_seed(0.0, 8)
    assert effective_seed(0.7, 7) == 7
