from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import PrivilegedContextError, RecordError
from miniverl_dist.ports import ChatFormat, Piece
from miniverl_dist.schemas.messages import Message, ToolCall, ToolSchema
from miniverl_dist.schemas.trajectory import Trajectory
from rollout_server.chat_format import Qwen36ChatFormat
from rollout_server.tool_calls import parse_qwen_xml, write_qwen_xml
from teacher_server.canvas import PRIVILEGED_KEY, Segment
from teacher_server.privileged import HEADING, require_equal_segments, solution_text
from teacher_server.rendering import OracleBlock, TeacherRendering, render
from tests.support.tiny_episodes import (
    CHAT,
    END,
    STUDENT,
    TEACHER,
    TEACHER_CHAT,
    Step,
    encode,
    play,
    scored,
    shown,
)

SECRET = "x" * 3 + "(1)"
NO_TOOLS: list[ToolSchema] = []


def rendered(
    trajectory: Trajectory, block: OracleBlock | None, mode: str = "native", **changes: Any
) -> TeacherRendering:
    arguments: dict[str, Any] = {
        "mode": mode,
        "student_format": CHAT,
        "teacher_format": TEACHER_CHAT,
        "teacher": STUDENT if mode == "verbatim" else TEACHER,
        "tools": NO_TOOLS,
        "block": block,
    }
    return render(trajectory, **(arguments | changes))


def without_block(rendering: TeacherRendering) -> tuple[int, ...]:
    (block,) = [s for s in rendering.segments if s.key == PRIVILEGED_KEY]
    return rendering.token_ids[: block.start] + rendering.token_ids[block.end :]


def block_text(rendering: TeacherRendering, mode: str) -> str:
    (block,) = [s for s in rendering.segments if s.key == PRIVILEGED_KEY]
    ids = rendering.token_ids[block.start : block.end]
    return STUDENT.decode(ids) if mode == "verbatim" else shown(ids)


EPISODE: tuple[Step, ...] = (
    ("user", "Q."),
    ("written", "<tool_call>x</tool_call>"),
    ("tool", ["one"]),
    ("sampled", [*encode("Hello"), END]),
    ("user", "bye"),
    ("sampled", [*b"so", END]),
)
BLOCK = OracleBlock(SECRET, before_message=3)


def test_the_block_is_a_user_turn_of_its_own_before_the_first_turn_of_the_policy() -> None:
    assert shown(rendered(play(*EPISODE), BLOCK).token_ids) == (
        "[B][U]Q.[A]</think><tool_call>x</tool_call>[E][U]<tool_result>one</tool_result>"
        f"[U]{SECRET}[A]</think>Hello[E][U]bye[A]</think>so[E]"
    )


def test_in_the_students_very_ids_it_stands_before_the_opening() -> None:
    trajectory = play(*EPISODE)
    rendering = rendered(trajectory, BLOCK, "verbatim")
    assert STUDENT.decode(rendering.token_ids) == STUDENT.decode(trajectory.token_ids).replace(
        "assistant\n<think>\n\n</think>\n\nHello",
        f"user\n{SECRET}\nassistant\n<think>\n\n</think>\n\nHello",
    )


def test_raw_text_has_no_turns_so_it_follows_the_context() -> None:
    trajectory = play(*EPISODE)
    rendering = rendered(trajectory, BLOCK, "raw")
    text = STUDENT.decode(trajectory.token_ids)
    assert shown(rendering.token_ids) == text.replace("Hello", f"{SECRET}\n\nHello")


@pytest.mark.parametrize("mode", ["native", "raw", "verbatim"])
def test_all_but_the_block_is_the_standard_rendering(mode: str) -> None:
    trajectory = play(*EPISODE)
    standard, privileged = rendered(trajectory, None, mode), rendered(trajectory, BLOCK, mode)
    assert without_block(privileged) == standard.token_ids
    assert SECRET in block_text(privileged, mode)
    size = len(privileged.token_ids) - len(standard.token_ids)
    assert [span.start - size for span in privileged.spans] == [s.start for s in standard.spans]
    for index in range(2):
        assert scored(privileged, index) == scored(standard, index)


@pytest.mark.parametrize("mode", ["native", "raw", "verbatim"])
def test_prefix_calls_before_the_block_stay_where_they_are(mode: str) -> None:
    """As a teacher is fitted: every written span is located, and no policy has sampled any."""
    trajectory = play(*EPISODE)
    standard = rendered(trajectory, None, mode, every_written=True)
    privileged = rendered(trajectory, BLOCK, mode, every_written=True)
    assert privileged.spans[0] == standard.spans[0]
    assert len(privileged.spans) == 3
    assert privileged.spans[1].start > standard.spans[1].start


@pytest.mark.parametrize("mode", ["native", "raw", "verbatim"])
def test_an_episode_in_which_the_policy_wrote_nothing_needs_no_block(mode: str) -> None:
    trajectory = play(("user", "q"), ("written", "Hello"), ("tool", ["r"]))
    privileged = rendered(trajectory, BLOCK, mode, every_written=True)
    assert privileged == rendered(trajectory, None, mode, every_written=True)


IDS = st.lists(st.sampled_from([*b"Hel\xf0", *encode("Hello Pantom"), END]), max_size=6)


@pytest.mark.parametrize("mode", ["native", "raw", "verbatim"])
@settings(deadline=None, max_examples=40)
@given(turns=st.lists(IDS, min_size=1, max_size=3), num_written=st.integers(0, 2))
def test_any_episode_is_the_same_around_the_block(
    mode: str, turns: list[list[int]], num_written: int
) -> None:
    steps: list[Step] = [("user", "é q")]
    for number in range(num_written):
        steps += [("written", f"Hel{number}"), ("tool", ["lo", "Yes"])]
    for ids in turns:
        steps += [("sampled", [*ids, END]), ("user", "go on")]
    block = OracleBlock("solve é", before_message=1 + 3 * num_written)
    standard = rendered(play(*steps), None, mode)
    assert without_block(rendered(play(*steps), block, mode)) == standard.token_ids


# --- broken on purpose -----------------------------------------------------------------------


class Forgetful:
    """A chat format that numbers its user turns, so that one more changes those behind it."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat, self._num_turns = chat, 0
        self.tokenizer, self.turn_end_id = chat.tokenizer, chat.turn_end_id
        self.tool_results, self.assistant_closing = chat.tool_results, chat.assistant_closing
        self.assistant_opening, self.written = chat.assistant_opening, chat.written

    def system(self, tools: Sequence[ToolSchema]) -> Piece:
        self._num_turns = 0
        return self._chat.system(tools)

    def user(self, content: str) -> Piece:
        self._num_turns += 1
        return self._chat.user(f"{self._num_turns}. {content}")


def test_a_segment_that_differs_is_an_error() -> None:
    trajectory = play(*EPISODE)
    forgetful = Forgetful(TEACHER_CHAT)
    rendered(trajectory, None, teacher_format=forgetful)
    with pytest.raises(PrivilegedContextError, match="segment 'user:1' has the teacher's ids"):
        rendered(trajectory, BLOCK, teacher_format=forgetful)


def test_a_block_behind_the_first_sampled_span_is_an_error() -> None:
    late = replace(BLOCK, before_message=5)
    for mode in ("native", "raw", "verbatim"):
        with pytest.raises(PrivilegedContextError, match="1 sampled spans"):
            rendered(play(*EPISODE), late, mode)
    with pytest.raises(PrivilegedContextError, match=r"0 blocks .* 2 sampled spans"):
        rendered(play(*EPISODE), replace(BLOCK, before_message=99))


def test_verbatim_needs_the_opening_in_its_place() -> None:
    trajectory = play(*EPISODE)
    other = Qwen36ChatFormat(STUDENT)
    other.assistant_opening = lambda: Piece(CHAT.assistant_opening().kind, (END,))  # type: ignore[method-assign]
    with pytest.raises(PrivilegedContextError, match="segment 'tool:0' does not end"):
        rendered(trajectory, BLOCK, "verbatim", student_format=other)


Spoil = Callable[[TeacherRendering], TeacherRendering]


def other_target(rendering: TeacherRendering) -> TeacherRendering:
    ids = list(rendering.token_ids)
    ids[rendering.spans[1].start] += 1
    return replace(rendering, token_ids=tuple(ids))


def other_offset(rendering: TeacherRendering) -> TeacherRendering:
    first, second = rendering.spans
    return replace(rendering, spans=(first, replace(second, start=second.start - 1)))


def other_bytes(rendering: TeacherRendering) -> TeacherRendering:
    first, second = rendering.spans
    ends = (*second.byte_ends[:-1], second.byte_ends[-1] + 1)
    return replace(rendering, spans=(first, replace(second, byte_ends=ends)))


def missing_span(rendering: TeacherRendering) -> TeacherRendering:
    return replace(rendering, spans=rendering.spans[:1])


def missing_segment(rendering: TeacherRendering) -> TeacherRendering:
    kept = tuple(segment for segment in rendering.segments if segment.key != "user:1")
    return replace(rendering, segments=kept)


def more_segments(rendering: TeacherRendering) -> TeacherRendering:
    return replace(rendering, segments=(*rendering.segments, Segment("user:9", 0, 1)))


def second_block(rendering: TeacherRendering) -> TeacherRendering:
    return replace(rendering, segments=(*rendering.segments, Segment(PRIVILEGED_KEY, 0, 1)))


@pytest.mark.parametrize(
    "spoil",
    [
        other_target,
        other_offset,
        other_bytes,
        missing_span,
        missing_segment,
        more_segments,
        second_block,
    ],
)
def test_every_difference_is_found(spoil: Spoil) -> None:
    trajectory = play(*EPISODE)
    standard, privileged = rendered(trajectory, None), rendered(trajectory, BLOCK)
    require_equal_segments(trajectory, standard, privileged)
    with pytest.raises(PrivilegedContextError):
        require_equal_segments(trajectory, standard, spoil(privileged))


# --- the text --------------------------------------------------------------------------------


def test_the_text_holds_every_call_in_the_students_wire_form() -> None:
    a, b, c = (ToolCall(name=name, arguments={"n": name}) for name in "abc")
    text = solution_text([[a, b], [], [c], []], write_qwen_xml)
    heading, first, second, third = text.split("\n\n")
    assert heading == HEADING
    assert [found.call for found in parse_qwen_xml(first).calls] == [a, b]
    assert second == "(no call)"
    assert [found.call for found in parse_qwen_xml(third).calls] == [c]


def test_where_nothing_is_left_to_do_the_text_says_so() -> None:
    assert solution_text([[]], write_qwen_xml) == solution_text([], write_qwen_xml)
    assert solution_text([], write_qwen_xml) == f"{HEADING}\n\n(no call)"


def test_a_call_that_the_wire_form_cannot_express_is_an_error() -> None:
    with pytest.raises(RecordError):
        solution_text([[ToolCall(name="f", arguments={"x": "</tool_call>"})]], write_qwen_xml)


def test_the_students_record_is_untouched() -> None:
    trajectory = play(*EPISODE)
    before = trajectory.model_dump_json()
    rendered(trajectory, BLOCK)
    assert trajectory.model_dump_json() == before
    assert SECRET not in before
    assert Message(role="user", content=SECRET) not in trajectory.messages
