from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from miniverl_dist.config.load import LoadedConfig, config_digest, load_config, load_run_config
from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.observability.run_dir import RunDirectory

BASE = """\
name: base
objective: grpo
tasks: {kind: split, num_eval: 20}
student: {}
loop: {num_steps: 3, num_groups: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("base.yaml", BASE)
    return tmp_path


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write("r.yaml", text), overrides)
    return str(caught.value).splitlines()


@pytest.mark.usefixtures("folder")
class TestMerging:
    def test_mappings_merge_and_lists_replace(self) -> None:
        write("mid.yaml", "extends: base.yaml\nloop: {group_size: 4}\noptim: {betas: [0.5, 0.6]}")
        path = write(
            "top.yaml", "extends: mid.yaml\nloop: {num_steps: 9}\noptim: {betas: [0, 0.5]}"
        )
        loaded = load_config(path)
        assert loaded.data["loop"] == {"num_steps": 9, "num_groups": 2, "group_size": 4}
        assert loaded.config.optim.betas == (0, 0.5)
        assert "extends" not in loaded.data

    def test_later_bases_win_and_the_file_itself_wins_over_all(self) -> None:
        write("one.yaml", "seed: 1\nname: one")
        write("two.yaml", "seed: 2")
        loaded = load_config(write("top.yaml", "extends: [base.yaml, one.yaml, two.yaml]"))
        assert (loaded.config.name, loaded.config.seed) == ("one", 2)
        assert (
            load_config(write("top.yaml", "extends: [base.yaml, one.yaml]\nseed: 7")).data["seed"]
            == 7
        )

    def test_bases_are_found_beside_the_file_that_names_them(self) -> None:
        write("lib/inner.yaml", "extends: ../base.yaml\nseed: 5")
        assert load_config(write("top.yaml", "extends: lib/inner.yaml")).config.seed == 5

    def test_another_kind_replaces_the_mapping(self) -> None:
        loaded = load_config(
            write("r.yaml", "extends: base.yaml\ntasks: {kind: ids, train: [a], eval: [b]}")
        )
        assert loaded.data["tasks"] == {"kind": "ids", "train": ["a"], "eval": ["b"]}

    def test_null_removes_a_section(self) -> None:
        write("opd.yaml", "extends: base.yaml\nopd: {coef: 0.1}")
        assert load_config(write("r.yaml", "extends: opd.yaml\nopd: null")).config.opd is None

    def test_one_base_may_be_reached_twice(self) -> None:
        write("l.yaml", "extends: base.yaml\nseed: 1")
        write("m.yaml", "extends: base.yaml\nname: m")
        assert load_config(write("r.yaml", "extends: [l.yaml, m.yaml]")).config.name == "m"

    def test_a_circle_is_named(self) -> None:
        write("b.yaml", "extends: c.yaml")
        write("c.yaml", "extends: [./b.yaml]")
        with pytest.raises(ConfigError, match=r"circle: b.yaml -> c.yaml -> b.yaml"):
            load_config(Path("b.yaml"))

    def test_a_missing_base_is_named_with_the_line_that_asks_for_it(self) -> None:
        with pytest.raises(ConfigError, match=r"^r.yaml:2: extends: cannot read recipe nix.yaml"):
            load_config(write("r.yaml", "seed: 1\nextends: nix.yaml"))

    @pytest.mark.parametrize("value", ["3", "{a: b}", "[1]"])
    def test_extends_is_a_path_or_a_list_of_paths(self, value: str) -> None:
        with pytest.raises(ConfigError, match=r"^r.yaml:1: extends: found .* expected a path"):
            load_config(write("r.yaml", f"extends: {value}"))


@pytest.mark.usefixtures("folder")
class TestOverrides:
    def test_values_follow_the_rules_of_the_file(self) -> None:
        loaded = load_config(
            Path("base.yaml"),
            ["optim.lr=3e-6", "loop.num_steps=5", "optim.betas=[0.1, 0.2]", "teacher=null"],
        )
        assert loaded.config.optim.lr == 3e-6
        assert loaded.config.optim.betas == (0.1, 0.2)
        assert loaded.data["loop"] == {"num_steps": 5, "num_groups": 2}

    def test_the_last_one_wins(self) -> None:
        assert load_config(Path("base.yaml"), ["seed=1", "seed=2"]).config.seed == 2

    def test_a_kind_and_then_its_fields(self) -> None:
        loaded = load_config(
            Path("base.yaml"), ["tasks.kind=ids", "tasks.train=[a]", "tasks.eval=[b]"]
        )
        assert loaded.config.tasks.kind == "ids"

    def test_text_that_looks_like_a_number_stays_text_in_quotes(self) -> None:
        assert load_config(Path("base.yaml"), ["name='7'"]).config.name == "7"

    @pytest.mark.parametrize("override", ["seed", "=1", "a..b=1", ".a=1"])
    def test_the_form_is_checked(self, override: str) -> None:
        with pytest.raises(ConfigError, match=r"expected KEY=VALUE"):
            load_config(Path("base.yaml"), [override])

    def test_an_unknown_path_is_named(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(Path("base.yaml"), ["optim.learning_rate.x=1"])
        assert str(caught.value).startswith(
            "override optim.learning_rate.x=1: optim.learning_rate: unknown key"
        )

    @pytest.mark.parametrize(
        ("overrides", "blamed"),
        [
            (
                ["evaluation.doubtful_ids=[x]", "evaluation.episodes_per_task=1"],
                "override evaluation.doubtful_ids=[x]",
            ),
            (
                ["evaluation={before: false, doubtful_ids: [x]}", "evaluation.every_n_steps=1"],
                "override evaluation={before: false, doubtful_ids: [x]}",
            ),
            (
                ["curriculum.initial_tail_calls=3", "curriculum.max_tail_calls=2", "seed=1"],
                "override curriculum.initial_tail_calls=3 and override curriculum.max_tail_calls=2",
            ),
            (
                ["teacher.rendering=native", "teacher.tokenizer=/own", "teacher.url=http://t"],
                "override teacher.rendering=native and override teacher.tokenizer=/own",
            ),
            (
                ["student.model.kind=hf", "student.model.dtype=float32"],
                "override student.model.kind=hf and override student.model.dtype=float32",
            ),
        ],
    )
    def test_of_a_section_those_are_blamed_that_the_problem_names(
        self, overrides: list[str], blamed: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(Path("base.yaml"), overrides)
        assert str(caught.value).startswith(f"{blamed}: ")

    def test_a_field_of_a_file_is_blamed_though_another_was_overridden(self) -> None:
        text = "extends: base.yaml\nevaluation:\n  doubtful_ids: [x]\n"
        [problem] = problems_of(text, "evaluation.episodes_per_task=1")
        assert problem.startswith("r.yaml:3: evaluation: found 1 doubtful_ids")


@pytest.mark.usefixtures("folder")
class TestProblems:
    def test_all_of_them_in_one_error_each_with_its_line(self) -> None:
        assert problems_of(
            "extends: base.yaml\n"
            "seed: on\n"
            "optim:\n"
            "  lr: -1\n"
            "  lrr: 2\n"
            "lookahead: 1\n"
            "loss: {dual_clip: 0.5}\n"
            "tasks: {num_eval: '3'}\n"
        ) == [
            "r.yaml:2: seed: found 'on', expected an integer",
            "r.yaml:8: tasks.num_eval: found '3', expected an integer",
            "r.yaml:7: loss.dual_clip: found 0.5, expected more than 1.0",
            "r.yaml:4: optim.lr: found -1, expected more than 0.0",
            "r.yaml:5: optim.lrr: unknown key; did you mean `lr`?",
            "r.yaml:6: lookahead: unknown key; did you mean `opd.lookahead`?",
        ]

    def test_a_key_without_a_neighbour_lists_what_is_known(self) -> None:
        assert problems_of("extends: base.yaml\ncheckpoint: {zzz: 1}") == [
            "r.yaml:2: checkpoint.zzz: unknown key; known here: every_n_steps, keep"
        ]

    def test_a_key_of_another_kind_is_not_suggested_to_be_itself(self) -> None:
        text = "extends: base.yaml\nenvironment: {kind: calculator, call_deadline_s: 3}"
        assert problems_of(text)[0].startswith(
            "r.yaml:2: environment.call_deadline_s: unknown key; known here: difficulty, "
        )

    def test_branches_of_a_union_are_one_problem(self) -> None:
        assert problems_of("extends: base.yaml\nopd: {lookahead: far}")[0] == (
            "r.yaml:2: opd.lookahead: found 'far', expected an integer or 'return_to_go'"
        )

    def test_variants_are_told_apart_by_kind(self) -> None:
        text = "extends: base.yaml\nteacher:\n  model:\n    kind: hf\n    pth: x\n"
        assert problems_of(text) == [
            "r.yaml:3: teacher.model.path: missing, but required",
            "r.yaml:5: teacher.model.pth: unknown key; did you mean `path`?",
        ]
        assert problems_of("extends: base.yaml\nteacher: {model: {kind: big}}") == [
            "r.yaml:2: teacher.model.kind: found 'big', "
            "expected 'toy' or 'hf' or 'student_backbone'"
        ]
        assert problems_of("name: x\nstudent: {}\nloop: {num_steps: 1}\ntasks: {split: tail}") == [
            "r.yaml:4: tasks.kind: missing, expected 'ids' or 'split'"
        ]

    def test_a_field_named_like_a_kind_is_still_found(self) -> None:
        assert problems_of("extends: base.yaml\ntasks: {split: tial}") == [
            "r.yaml:2: tasks.split: found 'tial', expected 'tail' or 'stratified'"
        ]

    def test_a_recipe_that_contradicts_itself(self) -> None:
        assert problems_of("extends: base.yaml\nobjective: grpo_opd") == [
            "r.yaml: objective grpo_opd needs a `teacher` section"
        ]
        assert problems_of("extends: base.yaml\ndeadlines: {generate_s: 1e9}")[0].startswith(
            "r.yaml:2: deadlines.generate_s (1000000000.0) exceeds take_s"
        )

    def test_a_missing_section_is_named(self) -> None:
        assert "r.yaml: loop: missing, but required" in problems_of("name: x")

    @pytest.mark.parametrize("text", ["", "- a\n", "just text"])
    def test_a_file_that_is_no_mapping(self, text: str) -> None:
        assert problems_of(text)[0].startswith("r.yaml: found no mapping")

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match=r"^cannot read recipe nix.yaml: No such file"):
            load_config(Path("nix.yaml"))

    def test_the_error_survives_pickling(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(Path("base.yaml"), ["seed=x"])
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class TestSavedForms:
    def saved(self, folder: Path, *overrides: str) -> tuple[LoadedConfig, Path]:
        path = write("r.yaml", "# a comment\nextends: base.yaml\noptim: {lr: 1e-6}\n")
        loaded = load_config(path, overrides)
        with RunDirectory.create(folder / "run") as run:
            loaded.save(run)
            run.write_json("manifest.json", {"config_digest": loaded.digest})
        return loaded, folder / "run"

    def test_submitted_is_the_file_byte_for_byte(self, folder: Path) -> None:
        _, run = self.saved(folder, "seed=4")
        assert (run / "config.submitted.yaml").read_bytes() == Path("r.yaml").read_bytes()

    def test_validated_has_what_was_written_and_no_default(self, folder: Path) -> None:
        _, run = self.saved(folder, "seed=4")
        text = (run / "config.validated.yaml").read_text()
        assert "seed: 4" in text
        assert "lr: 1e-06" in text
        assert "grad_clip" not in text

    def test_every_form_means_the_same_run(self, folder: Path) -> None:
        loaded, run = self.saved(folder, "seed=4")
        assert load_config(run / "config.validated.yaml").digest == loaded.digest
        assert load_config(run / "config.resolved.yaml").digest == loaded.digest
        again = load_run_config(run)
        assert (again.config, again.digest) == (loaded.config, loaded.digest)
        assert again.data == loaded.data
        assert again.submitted == loaded.submitted

    def test_forms_hold_no_absolute_path(self, folder: Path) -> None:
        loaded, run = self.saved(folder, "teacher={model: {kind: hf, path: models/smol}}")
        assert loaded.config.teacher is not None
        for path in run.glob("config.*"):
            assert str(folder) not in path.read_text()

    def test_the_digest_sees_values_and_not_their_spelling(self, folder: Path) -> None:
        del folder
        base = load_config(Path("base.yaml"))
        same = load_config(Path("base.yaml"), ["optim.lr=0.0005", "optim.grad_clip=1"])
        assert same.digest == base.digest == config_digest(base.config)
        assert load_config(Path("base.yaml"), ["optim.lr=5.1e-4"]).digest != base.digest

    def test_an_edited_config_is_refused(self, folder: Path) -> None:
        _, run = self.saved(folder)
        path = run / "config.resolved.yaml"
        path.write_text(path.read_text().replace("\nseed: 0", "\nseed: 1"))
        with pytest.raises(ConfigError, match=r"found digest .*, expected .* as in manifest.json"):
            load_run_config(run)

    def test_a_folder_that_is_no_run_is_refused(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="is not a run directory"):
            load_run_config(folder)

    def test_a_missing_form_is_named(self, folder: Path) -> None:
        _, run = self.saved(folder)
        (run / "config.submitted.yaml").unlink()
        with pytest.raises(RecordError, match=r"cannot read .*config.submitted.yaml"):
            load_run_config(run)
        assert json.loads((run / "manifest.json").read_text())
