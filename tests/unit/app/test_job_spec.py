"""Reading a job spec: every kind of problem is one line that says field, expected, got and what to do."""

from pathlib import Path

import pytest

from app.job_spec import load_spec
from storage.errors import SpecError
from tests.unit.app.specs import GOOD, good_spec, write_spec

JOBS = Path(__file__).parents[3] / "jobs"
TRAINING_KEYS = (
    "steps, passes, global_batch, micro_batch, learning_rate, betas, eps, weight_decay, schedule, warmup_steps, "
    "max_grad_norm, seed, precision, eval_every_steps, on_nonfinite"
)
NAME = "name: expected at most 100 letters, digits, `.`, `_` or `-`, the first of them not `.`, got "

OVERRIDES_AND_PROBLEMS = [
    (
        ["training.stepz=3"],
        [f"training.stepz: unknown key; expected one of {TRAINING_KEYS}; did you mean steps?"],
    ),
    (
        ["modell.path=x"],
        [
            (
                "modell: unknown key; expected one of name, storage, model, data, training, scaling, checkpoint, "
                "failures, export, fault_injection; did you mean model?"
            )
        ],
    ),
    (
        ["scaling.zzz=1"],
        ["scaling.zzz: unknown key; expected one of workers, gpus_per_worker, cpus_per_worker; remove or rename it"],
    ),
    (["training.steps=many"], ['training.steps: expected integer >= 1 or null, got "many"']),
    (["training.steps='60'"], ['training.steps: expected integer >= 1 or null, got "60"; write it without quotes']),
    (["training.steps=0"], ["training.steps: expected integer >= 1 or null, got 0"]),
    (["training.steps=true"], ["training.steps: expected integer >= 1 or null, got true"]),
    (["training.steps=1.5"], ["training.steps: expected integer >= 1 or null, got 1.5"]),
    (["training.seed="], ["training.seed: expected integer, got null"]),
    (["training.learning_rate=.nan"], ["training.learning_rate: expected a finite number, got NaN"]),
    (["checkpoint.threshold=.inf"], ["checkpoint.threshold: expected a finite number, got Infinity"]),
    (
        ["training.schedule=cosin"],
        [
            'training.schedule: expected one of constant, linear, cosine, got "cosin"; did you mean cosine?',
        ],
    ),
    (["training.betas=[0.9]"], ["training.betas.1: missing"]),
    (["model.path=5"], ["model.path: expected text, got 5; put it in quotes"]),
    (["model=tiny"], ['model: expected a mapping of keys to values, got "tiny"']),
    (["scaling="], ["scaling: expected a mapping of keys to values, got null"]),
    (["checkpoint.write_budget=[1]"], ["checkpoint.write_budget: expected number or text, got a list of 1"]),
    (
        ["checkpoint.write_budget=2x"],
        [
            'checkpoint.write_budget: expected a share such as 0.05 or "1/20", or a rate such as "50 MB/s", got \'2x\'',
        ],
    ),
    (
        ["checkpoint.staleness_bound_steps=3"],
        ["checkpoint: staleness_bound_steps must be at least 4 x interval_steps = 4, got 3"],
    ),
    (
        ["checkpoint.mode=full", "checkpoint.codec=delta"],
        ["checkpoint: codec must be raw or lossless in mode full (its recovery is exact), got delta"],
    ),
    (
        ["checkpoint.codec=losless"],
        ['checkpoint.codec: expected one of raw, lossless, delta, got "losless"; did you mean lossless?'],
    ),
    (["checkpoint.delta.weight_bits=3"], ["checkpoint.delta.weight_bits: expected one of 2, 4, 8, got 3"]),
    (["checkpoint.delta.block_elements=100"], ["checkpoint.delta.block_elements: expected a power of two, got 100"]),
    (["training.passes=2"], ["training: give steps or passes, one of them"]),
    (
        ["fault_injection=[{who: actor, step: 3, point: forward}]"],
        [
            (
                "fault_injection.0: point: expected one of before_commit, after_commit, report, begin_attempt, finish "
                "for actor, got forward"
            )
        ],
    ),
    (
        ["fault_injection=[{who: driver, step: 3, rank: 0}]"],
        ["fault_injection.0: rank: expected null for driver, got 0"],
    ),
    (
        ["fault_injection=[{who: driver, step: 3, attempt: 1}]"],
        ["fault_injection.0: attempt: expected null for driver, got 1"],
    ),
    (
        ["fault_injection=[{who: writer, step: 3, action: raise}]"],
        ["fault_injection.0: action: expected kill for writer, got raise"],
    ),
    (
        ["fault_injection=[{step: 3, point: forward, action: nan}]"],
        ["fault_injection.0: point: expected backward for action nan, got forward"],
    ),
    (
        ["fault_injection=[{step: 3}, {step: 4}, {step: 3, point: backward}]"],
        ["fault_injection.2: expected another address than fault_injection.0: a fault fires once"],
    ),
    (
        ["fault_injection=[{rank: 0}]"],
        [
            (
                "fault_injection.0.step: missing; expected integer >= 0 (It strikes when its point is first reached at "
                "or after this step: the step trained or restored (worker), of the version (writer), of the restore "
                "point or the report (actor), last reported (driver).)"
            )
        ],
    ),
    (
        ["fault_injection=[{rank: 0, step: 3, actoin: kill}]"],
        [
            (
                "fault_injection.0.actoin: unknown key; expected one of who, rank, step, point, attempt, action; "
                "did you mean action?"
            )
        ],
    ),
    (["name=a/b"], [NAME + '"a/b"; folders belong into storage.url']),
    (["name=../x"], [NAME + '"../x"; folders belong into storage.url']),
    (["name=.hidden"], [NAME + '".hidden"']),
    (['name="a\\n"'], [NAME + '"a\\n"']),
    (["name=''"], [NAME + '""']),
    (["name=5"], ["name: expected text, got 5; put it in quotes"]),
    (
        ["scaling.workers=2", "fault_injection=[{rank: 2, step: 61}]"],
        [
            "fault_injection.0.rank: expected less than scaling.workers = 2, got 2",
            "fault_injection.0.step: expected at most training.steps = 60, got 61",
        ],
    ),
    (["training.warmup_steps=61"], ["training.warmup_steps: expected at most training.steps = 60, got 61"]),
    (
        ["scaling.workers=9"],
        ["training.global_batch: expected at least one example for each of scaling.workers = 9, got 8"],
    ),
    (
        ["training.eval_every_steps=10"],
        [
            (
                "training.eval_every_steps: expected null without held-out examples, got 10; "
                "set data.eval_path or data.eval_examples"
            )
        ],
    ),
    (
        ["model.attention=flash_attention_2"],
        [
            (
                "model.attention: flash_attention_2 runs on GPUs only, got scaling.gpus_per_worker = 0; "
                "set model.attention to sdpa or give each worker a GPU"
            )
        ],
    ),
    (
        ["training.steps=x", "training.sed=1", "scaling.workers=0"],
        [
            'training.steps: expected integer >= 1 or null, got "x"',
            f"training.sed: unknown key; expected one of {TRAINING_KEYS}; did you mean seed?",
            "scaling.workers: expected integer >= 1, got 0",
        ],
    ),
    (["training.steps"], ["--set training.steps: expected KEY=VALUE, for example training.steps=60"]),
    (["=3"], ["--set : expected KEY=VALUE, for example training.steps=60"]),
    (["training..steps=3"], ["--set training..steps: expected KEY=VALUE, for example training.steps=60"]),
    (
        ["training.steps.x=3"],
        ["--set training.steps.x: training.steps is a single value, it has no `x`; set training.steps itself"],
    ),
    (
        ["fault_injection=[]", "fault_injection.0.rank=3"],
        ["--set fault_injection.0.rank: fault_injection is a list of 0, it has no `0`; set fault_injection itself"],
    ),
    (
        ["training.betas=[0.9"],
        ["--set training.betas: line 1, column 5: expected ',' or ']', but got '<stream end>'; fix the YAML there"],
    ),
]


@pytest.mark.parametrize(("overrides", "problems"), OVERRIDES_AND_PROBLEMS, ids=lambda value: value[0][:40])
def test_each_problem_is_one_line(tmp_path: Path, overrides: list[str], problems: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        good_spec(tmp_path, *overrides)
    assert str(caught.value).splitlines() == problems


TEXTS_AND_PROBLEMS = [
    ("", "empty; expected a job spec; `python -m app schema` lists its fields"),
    ("# nothing\n", "empty; expected a job spec; `python -m app schema` lists its fields"),
    ("- a\n- b\n", "expected a mapping of keys to values at the top level"),
    ("a: 1\nb: [1\nc: 2\n", "line 3, column 2: expected ',' or ']', but got ':'; fix the YAML there"),
    (
        "name: x\ntraining:\n  steps: 1\n  steps: 2\n",
        "line 4, column 3: duplicate key steps, first given on line 3; keep one; fix the YAML there",
    ),
    ("? [a]\n: 1\n", "line 1, column 3: a key must be text; fix the YAML there"),
    ("a: 1\n---\nb: 2\n", "line 2, column 1: but found another document; fix the YAML there"),
    (
        "a: !!python/object/apply:os.system [echo]\n",
        "line 1, column 4: could not determine a constructor for the tag; fix the YAML there",
    ),
    ("a: !!int x\n", "a value does not fit its YAML tag; remove the tag (`!!...`)"),
    ("a: \x07\n", "character 3: special characters are not allowed; save it as UTF-8 text"),
]


@pytest.mark.parametrize(("text", "problem"), TEXTS_AND_PROBLEMS)
def test_what_is_no_yaml_mapping_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = write_spec(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value) == f"{path}: {problem}"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere.yaml: no such file; expected the path of a job spec$"):
        load_spec(tmp_path / "nowhere.yaml")
    with pytest.raises(SpecError, match=r"is a directory; expected a readable YAML file$"):
        load_spec(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin.yaml: not UTF-8 text; expected a YAML file$"):
        load_spec(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    "lines",
    [
        "storage: {s3: {secret_key: hunter2}}",  # its pair is missing
        "storage: {s3: {access_key: hunter2, secret_key: [hunter2]}}",
        "storage: {s3: {secret: hunter2}}",
        "storage: {s3: hunter2}",
        "storage: s3://key:hunter2@bucket",
        "storage: {s3: {access_key: a, secret_key: *hunter2}}",
        "storage: {s3: {access_key: a, secret_key: !hunter2}}",
        "storage: {s3: {access_key: a, secret_key: 'hunter2}}",
        "storage: {s3: {access_key: a, secret_key: hunter2: }}",
    ],
)
def test_a_secret_is_never_shown(tmp_path: Path, lines: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write_spec(tmp_path, f"{GOOD}{lines}\n"))
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_secret_in_an_override_is_never_shown(tmp_path: Path) -> None:
    for value in ("{hunter2", "*hunter2", "hunter2"):
        with pytest.raises(SpecError) as caught:
            good_spec(tmp_path, f"storage.s3.secret_key={value}")
        assert "hunter2" not in str(caught.value)


def test_overrides_reach_sections_lists_and_fields_left_out(tmp_path: Path) -> None:
    spec = good_spec(
        tmp_path,
        "training.learning_rate=1e-4",
        "scaling.workers=3",
        "storage.s3.region=eu-central-1",
        "training.betas=[0.8, 0.9]",
        "fault_injection=[{rank: 0, step: 2}, {rank: 1, step: 3}]",
        "fault_injection.1.action=raise",
        "model.revision=2026-11-29",
        "training.max_grad_norm=null",
        "data.eval_path=a=b.jsonl",
    )
    assert spec.training.learning_rate == 1e-4
    assert spec.training.steps == 60
    assert spec.scaling.workers == 3
    assert spec.storage.s3.region == "eu-central-1"
    assert spec.training.betas == (0.8, 0.9)
    assert [(fault.rank, fault.action) for fault in spec.fault_injection] == [(0, "kill"), (1, "raise")]
    assert spec.model.revision == "2026-11-29"
    assert spec.training.max_grad_norm is None
    assert spec.data.eval_path == "a=b.jsonl"


def test_numbers_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    spec = good_spec(tmp_path, "training.eps=1E-9", "checkpoint.write_budget=5e-2", "training.weight_decay=.5")
    assert (spec.training.learning_rate, spec.training.eps) == (2e-5, 1e-9)
    assert (spec.checkpoint.write_budget, spec.training.weight_decay) == (0.05, 0.5)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_spec_is_valid(path: Path) -> None:
    load_spec(path)
