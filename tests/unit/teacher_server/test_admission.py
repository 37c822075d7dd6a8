"""How many tokens may wait, and how long a refusal says to wait."""

from __future__ import annotations

import pickle
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl_dist.errors import RequestRejectedError, ServerBusyError
from miniverl_dist.generate_api.wire import GenerateRequest
from teacher_server.admission import TokenAdmission


def prompts(*sizes: int, scored: bool = True) -> list[GenerateRequest]:
    return [GenerateRequest((1,) * size, return_logprob=scored) for size in sizes]


def test_tokens_are_held_for_the_length_of_the_block() -> None:
    admission = TokenAdmission(10)
    with admission.admit(prompts(4, 2)):
        assert (admission.num_tokens, admission.num_texts) == (6, 2)
        with pytest.raises(ServerBusyError, match="6 tokens are queued and 5 more exceed"):
            admission.admit(prompts(5)).__enter__()
        with admission.admit(prompts(4)):
            assert admission.num_tokens == 10
        with admission.admit(prompts(9, scored=False)):
            assert admission.num_tokens == 6
    assert (admission.num_tokens, admission.num_texts) == (0, 0)


def test_a_request_beyond_the_whole_queue_is_told_so() -> None:
    with pytest.raises(RequestRejectedError, match="the whole queue takes 10") as caught:
        TokenAdmission(10).admit(prompts(6, 5)).__enter__()
    assert caught.value.status == 413


def test_the_pause_follows_the_measured_speed() -> None:
    admission = TokenAdmission(1000, max_retry_after_s=60)
    with admission.admit(prompts(900)):
        assert admission.retry_after_s(600) == 1  # nothing measured yet
        admission.measured(500, 5.0)  # 100 tokens a second
        assert admission.retry_after_s(600) == 5
        admission.measured(800, 1.0)  # 0.3 * 800 + 0.7 * 100 = 310
        assert admission.retry_after_s(600) == 2
        for _ in range(50):
            admission.measured(1, 10.0)
        assert admission.retry_after_s(600) == 60
        with pytest.raises(ServerBusyError) as caught:
            admission.admit(prompts(600)).__enter__()
    assert caught.value.retry_after_s == 60
    assert pickle.loads(pickle.dumps(caught.value)).retry_after_s == 60


@given(st.lists(st.integers(1, 40), max_size=30))
def test_the_limit_holds_and_everything_is_given_back(sizes: list[int]) -> None:
    admission = TokenAdmission(100)
    with ExitStack() as stack:
        for size in sizes:
            before = admission.num_tokens
            try:
                stack.enter_context(admission.admit(prompts(size)))
            except ServerBusyError:
                assert before + size > 100
            assert admission.num_tokens <= 100
    assert admission.num_tokens == admission.num_texts == 0
