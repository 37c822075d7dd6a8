"""The one exception tree.

Every class takes one message (what was found, what was expected, where, what to do) so that every
instance survives pickling: Ray sends them between processes. Refusals that are part of normal
work (a teacher that turns a text down) are values, not exceptions: see ``schemas.teacher``.
"""

from __future__ import annotations


class MiniverlError(Exception):
    """Root of everything this project raises on purpose."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a task group first: the cause, where the others are consequences."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class ConfigError(MiniverlError):
    """A recipe that cannot be loaded, or that contradicts itself."""


class MissingDependencyError(MiniverlError):
    """An optional package is not installed; the message names the command that installs it."""


def install_hint(extra: str) -> str:
    """The command that installs the packages of an optional part."""
    return f"pip install '.[{extra}]' in a checkout"


class RecordError(MiniverlError):
    """A stored record (a trajectory line, an event) that does not hold what it claims."""


class MaskMismatchError(RecordError):
    """A stored loss mask that differs from the one its spans define."""


class PrefixPropertyError(RecordError):
    """A later turn that does not extend the ids of the earlier one."""


class PrivilegedContextError(RecordError):
    """A privileged rendering that differs from the standard one by more than its extra block."""


class ChecksumError(MiniverlError):
    """Bytes on disk that differ from the checksum written beside them."""


class CheckpointError(MiniverlError):
    """A checkpoint that is incomplete, of another run, or that could not be written."""


class ResumeError(CheckpointError):
    """A run that cannot be continued, for instance under another config."""


class TokenizerError(MiniverlError):
    """A tokenizer that cannot do what was asked, or is not the one that was expected."""


class UnspellableBytesError(TokenizerError):
    """Bytes that a vocabulary without all 256 byte tokens cannot spell."""


class TokenizerMismatchError(TokenizerError):
    """Ids of one tokenizer handed to a component that holds another."""


class AlignmentError(MiniverlError):
    """Two tokenisations that do not spell the same bytes, or arrays of foreign lengths."""


class BatchError(MiniverlError):
    """A training batch whose arrays contradict each other."""


class EmptyBatchError(BatchError):
    """Too many batches in a row without one token to train on."""


class StaleScoreError(MiniverlError):
    """A teacher score or target made for another policy version."""


class StaleCacheError(MiniverlError):
    """Stored teacher targets of another teacher, rendering, text or policy version."""


class TeacherError(MiniverlError):
    """The teacher failed and the config says that this ends the step."""


class TeacherDropFractionError(TeacherError):
    """More samples of a step lost their teacher score than the config allows."""


class GenerateApiError(MiniverlError):
    """A request or reply that breaks the ``/generate`` contract."""


class MalformedReplyError(GenerateApiError):
    """A reply that is no JSON, or not of the contract's form."""


class ReplyMismatchError(GenerateApiError):
    """A well-formed reply about other ids, or another number of them, than was asked."""


class NotFiniteError(GenerateApiError):
    """A logprob that is missing, NaN, infinite or above 0."""


class RequestRejectedError(GenerateApiError):
    """A request that a server turns down for what it says; asking again will not help."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ServerUnavailableError(GenerateApiError):
    """A server that cannot be reached, is busy, or failed inside; asking again may help."""


class ServerBusyError(ServerUnavailableError):
    """A server whose queue takes no more for now; ``retry_after_s`` is its own estimate."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(MiniverlError):
    """A rollout engine that failed, died, or answered something unusable."""


class PublishError(EngineError):
    """New weights that an engine did not confirm."""


class DeadlineError(MiniverlError):
    """Something that took longer than the deadline which config gives it."""


class EnvironmentFaultError(MiniverlError):
    """The environment itself failed; never the model's mistake."""


class TaskNotFoundError(MiniverlError):
    """A task id that the environment does not have."""


class UpdateError(MiniverlError):
    """An optimizer step that failed on at least one rank; no rank has committed."""


class OutOfMemoryError(UpdateError):
    """Memory ran out although the chunk could not be halved any further; nothing has changed."""


class StudentLostError(UpdateError):
    """A rank of the student has died, or its weights are only partly updated.

    Nothing but a rebuild and the newest commit brings the student back.
    """


class PlacementError(MiniverlError):
    """A placement that the cluster cannot give, or did not give in time."""


class EngineLostError(EngineError):
    """A rollout actor that has died or hangs; what it was playing can be played elsewhere."""
