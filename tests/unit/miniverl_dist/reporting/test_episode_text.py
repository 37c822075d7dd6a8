from __future__ import annotations

from miniverl_dist.reporting.episode_text import call_lines, episode_text, facts, shortened, turns
from miniverl_dist.schemas.messages import ParsedCall, ParseStatus
from tests.support.sample_run import trajectory


def test_prefix_calls_and_the_policys_own_words_are_told_apart() -> None:
    assert [turn.author for turn in turns(trajectory("a"))] == [
        "system",
        "user",
        "script, not sampled",
        "policy",
        "tool",
    ]


def test_long_messages_say_how_much_was_left_out() -> None:
    assert shortened("abcdef", 4) == "abcd\n… (2 more characters)"
    assert shortened("abcd", 4) == "abcd"
    assert turns(trajectory("a"), max_chars=3)[0].text.startswith("You\n…")


def test_facts_say_what_the_verifier_found() -> None:
    found = dict(facts(trajectory("a", passed=False)))
    assert found["passed"] == "no"
    assert found["reward"] == "0.250 (mean_partial 0.900)"
    assert found["verdict"] == "state_only: no, official_per_turn: no"
    assert found["calls"] == "1 attempted, 1 failed"
    assert found["tokens"] == "10, 3 of them sampled"


def test_numbers_in_a_verdict_are_not_taken_for_truth() -> None:
    changed = trajectory("a").model_copy(update={"verdict": {"share": 1.0, "why": None, "x": "y"}})
    assert dict(facts(changed))["verdict"] == "share: 1.000, why: -, x: y"


def test_calls_that_could_not_be_parsed_show_their_text() -> None:
    bad = ParsedCall(status=ParseStatus.MALFORMED, raw="<call", error="no end")
    changed = trajectory("a").model_copy(
        update={"tool_calls": (bad, *trajectory("a").tool_calls), "exec_successes": (False, False)}
    )
    assert call_lines(changed) == ["malformed: '<call' (no end)", "failed: cd(folder='a')"]
    assert episode_text(changed).endswith("failed: cd(folder='a')")
