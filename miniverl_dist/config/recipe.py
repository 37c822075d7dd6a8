"""How to roll out, credit, optimise and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from miniverl_dist.config.base import (
    Coefficient,
    ConfigModel,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Temperature,
)
from miniverl_dist.config.sglang_options import (
    ENGINE_OPTIONS,
    ENGINE_VARIABLES,
    option_names,
    refused_options,
)


class TaskIds(ConfigModel):
    """Explicit task ids."""

    kind: Literal["ids"]
    train: tuple[str, ...] = Field(min_length=1)
    eval: tuple[str, ...] = Field(min_length=1)
    """May repeat the training tasks; the report then says that it measures memorisation."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, ids in (("train", self.train), ("eval", self.eval)):
            repeated = sorted({i for i in ids if ids.count(i) > 1})
            if repeated:
                raise ValueError(
                    f"tasks.{name}: {', '.join(repeated)} given more than once; episodes of one "
                    "task are not independent (see evaluation.episodes_per_task)"
                )
        return self


class TaskSplit(ConfigModel):
    """A declared split of all tasks."""

    kind: Literal["split"]
    split: Literal["tail", "stratified"] = "tail"
    """``tail``: the last tasks in the data's order (one class only); ``stratified``: by classes.
    Variants of one task (BFCL's categories) stay together in both."""
    num_eval: PositiveInt = 30
    """Tasks, all variants counted: with C categories a multiple of C."""
    seed: int = 0
    """Of the stratified draw; fixed apart from the run's seed so that arms share it."""


class RewardWeights(ConfigModel):
    """Fractions of the reward's terms; the defaults are the tutorial's."""

    mean_partial: Fraction = 0.25
    first_call: Fraction = 0.20
    exec_score: Fraction = 0.10
    terminal_pass: Fraction = 0.45

    call_name: Fraction = 0.20
    call_known: Fraction = 0.15
    call_schema_valid: Fraction = 0.15
    call_structure: Fraction = 0.50

    structure_name: Fraction = 0.4
    structure_keys: Fraction = 0.3
    structure_keys_overlap: Fraction = 0.15
    """Instead of ``structure_keys`` where only some argument names are shared."""
    structure_values: Fraction = 0.3

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = max(self.structure_keys, self.structure_keys_overlap)
        sums = {
            "mean_partial, first_call, exec_score and terminal_pass": self.mean_partial
            + self.first_call
            + self.exec_score
            + self.terminal_pass,
            "call_name, call_known, call_schema_valid and call_structure": self.call_name
            + self.call_known
            + self.call_schema_valid
            + self.call_structure,
            "structure_name, structure_values and the larger of structure_keys and "
            "structure_keys_overlap": self.structure_name + self.structure_values + keys,
        }
        for names, total in sums.items():
            if total > 1 + 1e-6:
                raise ValueError(
                    f"environment.reward: {names} sum to {total:.6g}, expected at most 1: a reward "
                    "is between 0 and 1"
                )
        return self


BfclCategory = Literal["base", "long_context", "miss_func", "miss_param"]


def _as_tuple(found: Any) -> Any:  # noqa: ANN401 - not validated yet
    return tuple(found) if isinstance(found, list) else found


# The whole section passes a validator that hands it on as Python, where a strict tuple is no list.
_Categories = Annotated[tuple[BfclCategory, ...], Field(min_length=1), BeforeValidator(_as_tuple)]


class BfclConfig(ConfigModel):
    """BFCL V3 multi-turn."""

    kind: Literal["bfcl"] = "bfcl"
    categories: _Categories = ("base",)
    """Categories whose 200 tasks each make up the environment, in this order."""
    prompt: Literal["full", "names", "compact"] = "full"
    """Tools in the prompt: schemas, names only, none. The last two show the model only the user
    turn that it takes over, for models with a tiny context."""
    max_observation_chars: PositiveInt = 2000
    call_deadline_s: PositiveFloat = 5.0
    """CPU seconds; a call that took longer makes the episode a fault of the harness. Expensive
    calls are refused beforehand, so this catches only what those limits do not foresee."""
    reward: RewardWeights = RewardWeights()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.categories)) < len(self.categories):
            raise ValueError(
                f"environment.categories: {', '.join(self.categories)} names one more than once"
            )
        return self


class CurriculumConfig(ConfigModel):
    """Reverse-K: the model takes over T calls before the end."""

    schedule: Literal["fixed", "on_success"] = "on_success"
    """``fixed``: T grows by one after each batch; ``on_success``: a task's T grows when its group
    passes often enough."""
    initial_tail_calls: PositiveInt = 1
    max_tail_calls: PositiveInt | None = None
    """Largest T; None lets it grow to N."""
    pass_threshold: Fraction = 0.6
    """Pass rate of a group at which ``on_success`` lets T grow."""


class HFEngineConfig(ConfigModel):
    """Transformers, in the rollout process: small models, CPU or one GPU."""

    kind: Literal["hf"]
    batch_slots: PositiveInt = 16
    """Requests decoded at once."""


class SGLangEngineConfig(ConfigModel):
    """SGLang, one server per rollout actor."""

    kind: Literal["sglang"]
    python: Path | None = None
    """Interpreter of the environment that SGLang is installed in (scripts/install_sglang.sh);
    None: our own."""
    work_dir: Path | None = None
    """For a server's log and, with ``load_weights_by: disk``, its weights: best a disk of the
    engine's own machine. None: the run directory."""
    device: Literal["cuda", "cpu"] = "cuda"
    tensor: PositiveInt = 1
    """Tensor parallelism of one server; its actor needs as many GPUs."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of GPU memory for weights and KV cache."""
    max_total_tokens: Annotated[int, Field(ge=256)] | None = None
    """Tokens in the KV cache; None lets SGLang fill its share of memory. On a CPU it has to be
    set."""
    max_running_requests: PositiveInt = 64
    attention_backend: Annotated[str, Field(min_length=1)] | None = None
    """As SGLang names it; None leaves the choice to SGLang. ``torch_native`` on a CPU."""
    load_weights_by: Literal["disk", "distributed"] = "disk"
    """How published weights get from the actor into its server: ``disk``, through a folder of
    safetensors; ``distributed``, through a gloo group of the two, in the server's own memory."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 1024**3
    """``distributed``: the server holds so much of the new weights beside the old ones."""
    in_flight: Literal["finish", "continue"] = "finish"
    """Requests at work when new weights come: ``finish`` under the former ones first, or
    ``continue`` under the new ones; each token's version is stored."""
    memory_saver: bool = False
    """The server can give its GPU memory back while others need it."""
    start_deadline_s: PositiveFloat = 600.0
    """From the start of a server to its readiness."""
    load_deadline_s: PositiveFloat = 300.0
    """For each transfer and each check of weights."""
    control_deadline_s: PositiveFloat = 30.0
    """For pause, abort, flush and the like."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of ``sglang.launch_server``; none that the wrapper sets itself, and none
    that makes the model or its sampling another one than the trainer's."""
    extra_env: dict[str, str] = Field(default_factory=dict)
    """Variables for the server's process; none that the wrapper sets itself."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device == "cpu" and (self.tensor > 1 or self.memory_saver):
            raise ValueError(
                "rollout.engine: on device cpu, tensor must be 1 and memory_saver false: SGLang "
                "has neither there"
            )
        if self.device == "cpu" and self.max_total_tokens is None:
            raise ValueError(
                "rollout.engine.max_total_tokens is missing: on device cpu, SGLang would size its "
                "cache by the memory of the whole machine"
            )
        if refused := refused_options(option_names(self.extra_args), ENGINE_OPTIONS):
            raise ValueError(
                f"rollout.engine.extra_args: {', '.join(refused)} is set by the engine itself, or "
                "would make the server's model or its sampling another one than the trainer's: "
                "remove it"
            )
        if taken := sorted(ENGINE_VARIABLES & set(self.extra_env)):
            raise ValueError(
                f"rollout.engine.extra_env: {', '.join(taken)} is set by the engine itself: "
                "remove it"
            )
        return self


EngineConfig = Annotated[HFEngineConfig | SGLangEngineConfig, Field(discriminator="kind")]


class RolloutConfig(ConfigModel):
    """Sampling and the limits of an episode."""

    engine: EngineConfig | None = None
    """Samples a Megatron or hf student (the latter ``hf`` only, the default); a toy has its own."""

    temperature: Temperature = 1.0
    """Training samples, it does not decode greedily. Log-probabilities are divided by it on both
    sides: far below 1 they are of no use, and at 1e-6 SGLang turns greedy without a word."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Fraction = 0.0
    max_new_tokens: PositiveInt = 512
    """Per assistant turn."""
    max_context_tokens: PositiveInt = 16_384 - 512
    """Of an episode; a model with a shorter context has its own as the limit."""
    max_turns: PositiveInt = 16
    """An episode may take min(max_turns, max(2 T, 4)) assistant turns."""
    parse_error_limit: PositiveInt = 3
    """Messages in a row whose calls cannot be parsed."""
    tool_error_limit: PositiveInt = 3
    """Failing calls in a row."""
    repeated_call_limit: PositiveInt = 4
    """Times that the very same call may be made in a row."""
    episode_deadline_s: PositiveFloat | None = 600.0
    """Wall-clock limit of one episode; None where runs are compared bit for bit."""
    num_workers: PositiveInt = 8
    """Groups that are rolled out at once."""
    environment_threads: NonNegativeInt = 4
    """Threads per process that parse, call tools and verify; 0 does it on the event loop, where a
    debugger stops everything."""
    routing_replay: Literal["off", "on"] = "off"
    """``on``: the engine returns the experts it chose for each token of a mixture-of-experts
    student, and the update sends the tokens to the same ones. Trajectories then hold one index per
    layer and chosen expert for every token."""


class GrpoConfig(ConfigModel):
    """Group advantage."""

    normalize_std: bool = False
    std_floor: PositiveFloat = 1e-3
    zero_variance: Literal["keep", "drop"] = "keep"
    """``drop`` refills a group whose rewards are all equal, up to ``max_refills`` times."""
    max_refills: NonNegativeInt = 4
    """Spent too on groups without an episode to train on, which every online objective refills."""


class OpdConfig(ConfigModel):
    """On-policy distillation term of the advantage."""

    coef: Coefficient = 0.3
    rule: Literal["unit", "mean", "proportional", "equal_teacher"] = "unit"
    lookahead: NonNegativeInt | Literal["return_to_go"] = 1
    """Following units whose log-ratios a unit's weight includes. 0 rewards wrong short tokens
    whose bytes are a prefix of the right text; see docs/math.md."""
    discount: Fraction = 1.0
    """Of ``return_to_go``."""
    clip: PositiveFloat | None = 3.0
    """Nats; bounds the summed log-ratio symmetrically."""
    stop_after: PositiveFloat | None = 3.0
    """Nats; no OPD in a span behind the first unit with a larger log-ratio."""
    baseline: Literal["none", "leave_one_out"] = "none"
    sign: Literal[1, -1] = 1
    """-1 turns the term around, to show what that does (`make demo-sign`); never train with it."""
    allow_untempered_teacher: bool = False
    """Accept a temperature other than 1 although prefill scores ignore it."""


CLIP_RANGES = {"ppo": (0.2, 0.28), "gspo_token": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
"""Default (clip_low, clip_high) of each loss: a sequence's mean ratio moves far less than a
token's, and CISPO bounds the weight, not the gradient."""


class LossConfig(ConfigModel):
    """Policy loss."""

    kind: Literal["ppo", "gspo_token", "cispo"] = "ppo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = CLIP_RANGES["ppo"][0]
    """The ratio's lower bound is 1 - clip_low; the default depends on ``kind``."""
    clip_high: PositiveFloat = CLIP_RANGES["ppo"][1]
    """The ratio's upper bound is 1 + clip_high; the default depends on ``kind``."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the loss of tokens with a negative advantage (ppo only)."""
    mismatch_cap: PositiveFloat | None = 2.0
    """Truncated importance sampling: min(proximal / rollout, cap), detached; None leaves it out."""
    mismatch_alarm_mean: PositiveFloat | None = 0.05
    """Nats; a larger mean |log-probability of the trainer - of the engine| on a step's tokens is an
    ``engine_mismatch`` event. Under a policy lag the updates in between count too. None: none."""
    mismatch_alarm_ratio: Annotated[float, Field(gt=1)] | None = 50.0
    """The same for the largest ratio, either way, of a token's two probabilities."""
    reduction: Literal["token_mean", "trajectory_mean"] = "token_mean"
    kl_coef: Coefficient = 0.0
    """Weight of the KL to the frozen reference policy."""
    kl_estimator: Literal["k3", "k1_in_reward"] = "k3"
    """``k3`` as a loss, importance-weighted; ``k1_in_reward`` subtracts the log-ratio from the
    advantage. k1 as a loss has zero expected gradient and is not offered."""
    chunk_size: PositiveInt = 256
    """Rows of the vocabulary projection held at once; changes neither loss nor gradient."""

    @model_validator(mode="before")
    @classmethod
    def _default_clip_range(cls, data: Any) -> Any:  # noqa: ANN401 - not validated yet
        if not isinstance(data, dict) or data.get("kind") not in CLIP_RANGES:
            return data
        low, high = CLIP_RANGES[data["kind"]]
        return {"clip_low": low, "clip_high": high} | data


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(ConfigModel):
    """AdamW."""

    lr: LearningRate = 5e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    grad_clip: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    """Batches over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear"] = "constant"
    """``linear`` falls to 0 behind the last batch."""


class LoopConfig(ConfigModel):
    """Sizes of a step, and how far rollouts may run ahead."""

    num_steps: PositiveInt
    num_groups: PositiveInt = 8
    group_size: PositiveInt = 8
    num_minibatches: PositiveInt = 1
    """Optimizer steps per batch; above 1 the run is labelled ``minibatched``."""
    max_policy_lag: NonNegativeInt = 0
    """Publishes between a trajectory's oldest span and its use; 0 is strict."""
    accumulate: bool = False
    """Compute a group's gradients when it arrives, while the others of its batch are still sampled;
    the optimizer step waits for all. The same update but for rounding, and only for objectives
    that need no sight of the whole batch."""
    max_empty_batches: PositiveInt = 10
    analysed_groups: NonNegativeInt = 1
    """Groups of each step whose sampled tokens are written to token_analysis.jsonl."""


class EvaluationConfig(ConfigModel):
    """Evaluation of the student inside a run, and of the others before it."""

    every_n_steps: PositiveInt | None = None
    """Evaluate after every so many trained batches; None: not in between."""
    before: bool = True
    """Evaluate the student before anything is trained; ``baselines`` are measured either way."""
    warm: bool = True
    """Evaluate the student at the end of its warm-up, where it has one."""
    after: bool = True
    """Evaluate the trained student when the last step is done."""
    tail_calls: PositiveInt | Literal["all"] = 1
    """T, the calls left to the policy; ``all``: every T from 1 to N of each task."""
    episodes_per_task: PositiveInt = 4
    temperature: NonNegativeFloat = 1.0
    """0 decodes greedily."""
    baselines: tuple[Literal["teacher", "null", "oracle"], ...] = ("null",)
    """Other policies measured once before training."""
    max_concurrency: PositiveInt = 16
    deploy_engine: SGLangEngineConfig | None = None
    """The server of ``eval --deploy sglang``; None takes ``rollout.engine`` where that is SGLang,
    and else an SGLang in this very environment."""
    doubtful_ids: tuple[str, ...] = ()
    """Tasks whose answer key is in doubt. They are played and counted like all others; tables show
    the share of tasks without doubt as the practical ceiling."""
    doubtful_source: str = ""
    """Where the doubt is written down, for instance the address of a public thread."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if 0 < self.temperature < 0.01:
            raise ValueError(
                f"evaluation.temperature: found {self.temperature}, expected at least 0.01, or 0 "
                "to decode greedily"
            )
        return self

    @model_validator(mode="after")
    def _check_doubt(self) -> Self:
        if bool(self.doubtful_ids) != bool(self.doubtful_source):
            raise ValueError(
                f"evaluation: found {len(self.doubtful_ids)} doubtful_ids and doubtful_source "
                f"{self.doubtful_source!r}; give both or neither, for a ceiling without a source "
                "cannot be checked"
            )
        return self


class CheckpointConfig(ConfigModel):
    """Commits."""

    every_n_steps: PositiveInt = 5
    keep: PositiveInt = 2
    """Newest checkpoints kept; older ones are removed after the next commit."""


class DeadlineConfig(ConfigModel):
    """Seconds that each wait of the loop may take."""

    take_s: PositiveFloat = 1800.0
    update_s: PositiveFloat = 1800.0
    publish_s: PositiveFloat = 600.0
    generate_s: PositiveFloat = 600.0
    evaluate_s: PositiveFloat = 3600.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.generate_s > self.take_s:
            raise ValueError(
                f"deadlines.generate_s ({self.generate_s}) exceeds take_s ({self.take_s}): the "
                "trainer would give up before a single generation may"
            )
        return self
