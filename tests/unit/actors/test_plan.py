"""Counts against real Megatron and by hand, fits and misfits, the command."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.memory_estimate import GIB, layer_activations
from actors.placement import NodeResources, Role, rank_coordinates
from actors.plan import Device, Plan, make_plan, parse_nodes
from actors.plan_view import render
from actors.sharding import RankParameters, Sharding, num_buckets
from miniverl_dist.backends.megatron.architecture import Architecture, read_architecture
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, PlacementError
from tests.support.cli import outcome

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "configs" / "bfcl_qwen36_35b_2x8_h100.yaml"
LOCAL = ROOT / "configs" / "local_megatron.yaml"
MODELS = ROOT / "configs" / "models"


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their models relative to where a command runs."""
    monkeypatch.chdir(ROOT)


def config(recipe: Path, *overrides: str) -> RunConfig:
    return load_config(recipe, overrides).config


@cache
def reference_plan(*overrides: str, gpu_memory_gib: float = 80.0) -> Plan:
    return make_plan(config(REFERENCE, *overrides), device=Device(gpu_memory_gib))


@cache
def tiny(name: str) -> Architecture:
    return read_architecture(MODELS / f"tiny_{name}.json")


TINY = ("qwen3", "qwen3_moe", "qwen3_5_moe")


class TestSharding:
    def test_agrees_with_megatron_on_every_rank(self) -> None:
        from tests.support.requirements import require_megatron

        require_megatron()
        from tests.support.ranks import run_ranks

        cases = [
            (name, layout)
            for name in TINY
            for layout in LAYOUTS
            if tiny(name).problem(layout) is None
        ]
        assert len(cases) >= 8
        counted = run_ranks(4, count_parameters, cases, timeout_s=120)
        for number, (name, layout) in enumerate(cases):
            sharding = Sharding(tiny(name), layout)
            for place in rank_coordinates(layout, 4):
                found = sharding.rank(place)
                assert (found.dense, found.expert) == counted[place.rank][number], (name, layout)

    @given(
        st.sampled_from(TINY),
        st.sampled_from((1, 2, 4)),
        st.sampled_from((1, 2, 4)),
        st.integers(1, 3),
    )
    def test_stages_and_experts_cover_everything_once(
        self, name: str, pipeline: int, expert: int, replicas: int
    ) -> None:
        """Without TP nothing is replicated within a copy: sums over ranks are exact."""
        arch = tiny(name)
        layout = ParallelConfig(pipeline=pipeline, expert=expert if arch.experts else 1)
        sharding = Sharding(arch, layout)
        places = rank_coordinates(layout, pipeline * layout.expert * replicas)
        ranks = [sharding.rank(place) for place in places]
        whole = Sharding(arch, ParallelConfig()).cell(0, 0)
        assert whole.total == arch.num_parameters
        second = arch.vocab_size * arch.hidden_size if arch.tie_embeddings and pipeline > 1 else 0
        assert sum(rank.expert for rank in ranks) == whole.expert * replicas
        assert sum(rank.dense for rank in ranks) == (whole.dense + second) * (
            layout.expert * replicas
        )

    def test_tensor_parallel_ranks_share_all_but_the_norms_and_routers(self) -> None:
        arch = tiny("qwen3_5_moe")
        one, two = (
            Sharding(arch, ParallelConfig(tensor=t, sequence=t > 1)).cell(0, 0) for t in (1, 2)
        )
        hidden = arch.hidden_size
        assert arch.experts is not None
        assert arch.linear is not None
        per_layer = 2 * hidden + (arch.experts.num_experts + 1) * hidden
        norms = {
            "full_attention": 2 * arch.head_dim,
            "linear_attention": arch.linear.value_head_dim,
        }
        replicated = hidden + sum(per_layer + norms[kind] for kind in arch.layer_kinds)
        assert 2 * two.dense - one.dense == replicated
        assert two.expert == one.expert

    def test_vocabulary_is_padded_to_the_tensor_ranks(self) -> None:
        arch = tiny("qwen3").with_vocab_size(1001)
        even = Sharding(arch.with_vocab_size(1002), ParallelConfig(tensor=2)).cell(0, 0)
        assert Sharding(arch, ParallelConfig(tensor=2)).cell(0, 0) == even


LAYOUTS = (
    ParallelConfig(tensor=2, sequence=True),
    ParallelConfig(pipeline=2),
    ParallelConfig(tensor=2, pipeline=2, sequence=True),
    ParallelConfig(expert=4),
    ParallelConfig(tensor=2, sequence=True, expert=2),
    ParallelConfig(pipeline=2, expert=2),
    ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=2),
)


def count_parameters(rank: Any, cases: list[tuple[str, ParallelConfig]]) -> list[tuple[int, int]]:
    from miniverl_dist.backends.megatron.setup import build_model
    from miniverl_dist.config.roles import MegatronModelConfig

    counts = []
    for name, layout in cases:
        model = MegatronModelConfig(
            kind="megatron", config=MODELS / f"tiny_{name}.json", parallel=layout
        )
        with rank.layout(layout):
            built = build_model(tiny(name), model, seed=0)
            sizes = [0, 0]
            for tensor_name, parameter in built.module.named_parameters():
                sizes[".experts." in tensor_name] += parameter.numel()
            counts.append((sizes[0], sizes[1]))
    return counts


class TestReferenceRun:
    def test_sizes_of_the_model_are_the_published_ones(self) -> None:
        plan = reference_plan()
        assert plan.num_parameters is not None
        assert plan.num_active_parameters is not None
        assert 34e9 < plan.num_parameters < 36e9  # "35B"
        assert 3e9 < plan.num_active_parameters < 4e9  # "A3B"
        layers = read_architecture(MODELS / "qwen3_6_35b_a3b.json").layer_kinds
        assert layers == (("linear_attention",) * 3 + ("full_attention",)) * 10

    def test_fits_two_nodes_of_eight_and_a_third(self) -> None:
        plan = make_plan(config(REFERENCE), nodes=parse_nodes(["3x64,8"]))
        plan.require()
        assert plan.fit is not None
        assert plan.fit.assignment[Role.STUDENT, 1] == "1"
        assert [place.pp for place in plan.ranks] == [0] * 8 + [1] * 8
        with pytest.raises(PlacementError, match=r"(?s)no room.*does not fit\n  rollout 0"):
            make_plan(config(REFERENCE), nodes=parse_nodes(["2x64,8"])).require()

    def test_bytes_of_a_rank_by_hand(self) -> None:
        """Experts: 256 x 3 x 2048 x 512 x 40 layers, over PP2 x EP4; their optimizer over 2."""
        first = reference_plan().memory[0]
        experts = 256 * 3 * 2048 * 512 * 40 // 8
        dense = first.parameters.dense
        assert first.parameters.expert == experts
        assert first.weights_bytes == 2 * (dense + experts)
        assert first.gradient_bytes == 4 * (dense + experts)
        assert first.optimizer_bytes == pytest.approx(12 * (dense / 4 + experts / 2), rel=1e-6)
        assert first.host_bytes == 2 * first.weights_bytes
        assert first.logits_bytes == 0
        assert reference_plan().memory[8].logits_bytes > 0

    def test_full_recompute_keeps_the_inputs_of_two_microbatches(self) -> None:
        """Stage 0 of 2 has two in flight; 16,384 columns over CP2 and SP2."""
        columns, hidden, layers = 16_384 // 4, 2048, 20
        first, last = (reference_plan().memory[rank].activation_bytes for rank in (0, 8))
        assert first - last == layers * columns * hidden * 2

    @pytest.mark.parametrize(
        ("override", "gib", "message"),
        [
            ("seed=0", 40.0, "student: rank 8 needs about 52"),
            ("student.model.distributed_optimizer=false", 80.0, "optimizer 51"),
            ("student.model.recompute=selective", 80.0, "recompute: full"),
            ("student.model.max_microbatch_tokens=524288", 80.0, "smaller max_microbatch_tokens"),
            ("rollout.engine.tensor=1", 80.0, "rollout engine: weights 64"),
            ("cluster.rollout.gpus_per_actor=1", 80.0, "needs one GPU per tensor rank"),
            ("rollout.engine.mem_fraction_static=0.4", 80.0, "there are 32.0 GiB"),
        ],
    )
    def test_what_cannot_fit_is_refused(self, override: str, gib: float, message: str) -> None:
        plan = reference_plan(override, gpu_memory_gib=gib)
        assert len(plan.problems) >= 1
        with pytest.raises(PlacementError, match=message):
            plan.require()

    def test_a_layout_that_the_model_does_not_allow_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="2 key/value heads do not divide by tensor = 4"):
            make_plan(config(REFERENCE, "student.model.parallel.tensor=4"))

    def test_longer_than_the_model_reads(self, tmp_path: Path) -> None:
        data = json.loads((MODELS / "qwen3_6_35b_a3b.json").read_text())
        short = tmp_path / "config.json"
        short.write_text(json.dumps(data | {"max_position_embeddings": 8192}))
        plan = make_plan(config(REFERENCE, f"student.model.config={short}"))
        assert any("15872 tokens exceed max_position_embeddings 8192" in p for p in plan.problems)

    def test_publish_and_engine(self) -> None:
        plan = reference_plan()
        assert plan.publish is not None
        assert plan.engine is not None
        assert plan.num_parameters is not None
        assert plan.publish.total_bytes == 2 * plan.num_parameters
        assert plan.publish.num_buckets == 33  # 32.3 GiB a stage, 1 GiB each, stages side by side
        # 10 full layers, 1 of 2 key/value heads a GPU, keys and values of 256 in bfloat16.
        assert plan.engine.kv_bytes_per_token == 10 * 2 * 256 * 2
        # 30 delta nets: 32 x 128 x 128 float32, and 3 of 8192 channels in bfloat16; half a GPU.
        states = 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2) // 2
        assert plan.engine.state_bytes_per_request == states
        disk = reference_plan("publish.transport=broadcast").publish
        assert disk is not None
        assert plan.publish.moved_bytes - disk.moved_bytes == plan.publish.total_bytes

    def test_how_weights_get_into_a_server_and_what_that_writes(self) -> None:
        def text(*overrides: str) -> str:
            found = reference_plan(*overrides).publish
            assert found is not None
            return found.into_servers

        assert "writes 64.6 GiB as safetensors below the run directory" in text()
        assert "work_dir (local/x)" in text("rollout.engine.work_dir=local/x")
        group = text("rollout.engine.load_weights_by=distributed")
        assert "nothing is written to a disk" in group
        assert "1 GiB at a time" in group
        assert text() in " ".join(render(reference_plan(), width=4000).split())
        local = make_plan(config(LOCAL)).publish
        assert local is not None
        assert local.into_servers == ""  # transformers computes in the actor itself

    def test_workers_that_cannot_sample_ahead_are_noted(self) -> None:
        notes = reference_plan("loop.max_policy_lag=1").notes
        assert any("rollout.num_workers is 16: raise it to 32" in note for note in notes)
        enough = reference_plan("loop.max_policy_lag=1", "rollout.num_workers=32").notes
        assert not any("num_workers" in note for note in enough)

    def test_an_engine_that_nobody_named_is_named(self) -> None:
        [note] = [n for n in make_plan(config(LOCAL, "rollout.engine=null")).notes if "engine" in n]
        assert note.startswith("rollout.engine is not given: transformers samples (kind hf)")

    def test_phases_in_order_with_counts(self) -> None:
        phases = {phase.name: phase for phase in reference_plan().phases}
        assert list(phases) == [
            "rollout",
            "score",
            "batch",
            "proximal logprobs",
            "reference logprobs",
            "update",
            "publish",
            "commit",
        ]
        assert phases["rollout"].max_tokens == 16 * 8 * 15_872
        # The teacher's texts have a limit of their own: its tokens are not the student's.
        assert "at most 12 at once" in phases["score"].what
        assert phases["score"].max_tokens == 16 * 8 * 32_768
        assert phases["update"].what == (
            "8 optimizer step(s), at most 8 microbatches on each of 2 replicas"
        )
        # bfloat16 weights and reference, float32 masters, two float32 moments: 16 bytes each.
        gib = 16 * (reference_plan().num_parameters or 0) / GIB
        assert phases["commit"].what.startswith(f"about {gib:.3g} GiB of weights")
        without = make_plan(config(REFERENCE, "loss.kl_coef=0.0"))
        assert "reference logprobs" not in {phase.name for phase in without.phases}
        assert without.memory[0].host_bytes == 0


class TestActivations:
    def test_a_dense_layer_by_hand(self) -> None:
        arch = tiny("qwen3")
        found = layer_activations(arch, 0)
        queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        assert found.sequence == 4 * arch.hidden_size
        assert found.tensor == 2 * queries + 2 * keys + 3 * arch.ffn_size
        assert found.routed == 0

    def test_routed_copies_count_once_for_each_chosen_expert(self) -> None:
        arch = tiny("qwen3_moe")
        assert arch.experts is not None
        chosen, width = arch.experts.experts_per_token, arch.experts.ffn_size
        assert layer_activations(arch, 0).routed == chosen * (2 * arch.hidden_size + 3 * width)

    def test_each_way_to_save_activations_saves_some(self) -> None:
        sizes = {}
        for recompute in ("none", "selective", "full"):
            made = make_plan(config(LOCAL, f"student.model.recompute={recompute}"))
            sizes[recompute] = made.memory[0].activation_bytes
        assert sizes["none"] > sizes["selective"] > sizes["full"] > 0
        # On a CPU attention keeps its scores: all but one layer's are spared.
        arch = tiny("qwen3")
        scores = 2 * (arch.num_heads // 2) * 2048 * 256 * 4
        assert sizes["none"] - sizes["selective"] == (arch.num_layers - 1) * scores

    def test_splits_divide_what_they_should(self) -> None:
        base = reference_plan("student.model.recompute=none").memory[8].activation_bytes
        one_cp = reference_plan(
            "student.model.recompute=none",
            "student.model.parallel.context=1",
        )
        assert one_cp.memory[8].activation_bytes == pytest.approx(2 * base, rel=1e-6)


class TestLocalRun:
    def test_two_cpus_are_enough_and_one_is_not(self) -> None:
        made = make_plan(config(LOCAL), nodes=[NodeResources("here", 2, 0)])
        made.require()
        assert made.usable_bytes is None
        assert [place.tp for place in made.ranks] == [0, 1]
        assert made.publish is not None
        assert made.publish.num_buckets > 1
        assert any("restricted" in note for note in made.notes)
        tight = make_plan(config(LOCAL), nodes=[NodeResources("here", 1, 0)])
        with pytest.raises(PlacementError, match="no room"):
            tight.require()

    def test_a_toy_student_has_a_placement_and_phases(self) -> None:
        recipe = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
        made = make_plan(config(recipe, "runtime=cluster"))
        assert [group.role for group in made.placement.groups] == list(Role)
        assert made.num_parameters is None
        assert made.phases[0].max_tokens == 2 * 3 * 256
        assert made.phases[-1].name == "evaluate"

    def test_groups_across_nodes_are_noted(self) -> None:
        made = make_plan(
            config(LOCAL, "cluster.student.num_nodes=2", "cluster.student.ranks_per_node=1")
        )
        assert any("tensor groups of 2 ranks cross nodes of 1" in note for note in made.notes)


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(1, 10))
def test_buckets_are_filled_in_order(sizes: list[int], limit: int) -> None:
    buckets: list[list[int]] = []
    for size in sizes:
        if buckets and sum(buckets[-1]) + size <= limit:
            buckets[-1].append(size)
        else:
            buckets.append([size])
    assert num_buckets({str(i): size for i, size in enumerate(sizes)}, limit) == len(buckets)


class TestCommand:
    def run(self, *arguments: object) -> tuple[int, str, str]:
        return outcome("plan", *arguments)

    def test_shows_everything(self) -> None:
        code, out, err = self.run(REFERENCE, "--node", "3x64,8")
        assert (code, err) == (0, "")
        for part in (
            "34.7 B parameters",
            "takes student 1",
            "expert dp",
            "0-7",
            "8-15",
            "33 bucket",
        ):
            assert part in out
        assert "estimates; formulas: docs/cluster.md" in out
        assert max(map(len, out.splitlines())) <= 100

    def test_json(self) -> None:
        code, out, _ = self.run(LOCAL, "--json", "--node", "2,0")
        data = json.loads(out)
        assert code == 0
        assert data["assignment"][0] == ["student", 0, "0"]
        first = data["memory"][0]
        parts = ("weights", "gradient", "optimizer", "activation", "logits")
        assert first["device_bytes"] == sum(first[f"{name}_bytes"] for name in parts)
        assert [rank["tp"] for rank in data["ranks"]] == [0, 1]

    def test_shows_the_plan_and_fails_when_it_does_not_fit(self) -> None:
        code, out, err = self.run(REFERENCE, "--gpu-memory-gib", 40, "--reserve-gib", 2)
        assert code == 2
        assert "at most 38 GiB usable" in out
        assert err.startswith("error: this run does not fit:\nstudent: rank 8 needs about")
        assert "after the reserve of 2 GiB" in err

    @pytest.mark.parametrize("node", ["8", "8,", "x8,1", "0.5.1,2", "0x8,0", "00x8,0"])
    def test_a_node_in_another_form(self, node: str) -> None:
        code, _, err = self.run(LOCAL, "--node", node)
        assert (code, "expected CPUS,GPUS" in err) == (2, True)

    def test_rows_of_equal_ranks_are_joined(self) -> None:
        text = render(reference_plan(), width=120)
        assert text.count("8.65 GiB") == 2

    def test_parameters_of_a_rank_add_up(self) -> None:
        assert RankParameters(3, 4).total == 7
        assert reference_plan().memory[0].device_bytes < 74 * GIB
