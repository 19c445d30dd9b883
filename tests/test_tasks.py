"""The contract of tasks, over every task file of the package, and the jsonl file format."""

import dataclasses
import importlib
import json
import pkgutil
import random

import pytest

import moe_rl.tasks
from moe_rl.tasks.base import SPLITS, Example, Task, overlap, position_share, split_of
from moe_rl.tasks.chain_sum import ChainSum
from moe_rl.tasks.jsonl import JsonLines
from moe_rl.tasks.reverse import Reverse
from moe_rl.tasks.sort_digits import SortDigits

STEMS = sorted(m.name for m in pkgutil.iter_modules(moe_rl.tasks.__path__) if m.name != "base")
GARBAGE = ["", " ", "\n", "\0", "=" * 5000, "ß٣௩", "\ud800", "12,3", "-1", "nan", "<eos>", "0" * 11]


def task_class(stem: str) -> type[Task]:
    module = importlib.import_module(f"moe_rl.tasks.{stem}")
    found = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Task) and kind.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{stem}.py must define one task, it defines {found}"
    return found[0]


def write_lines(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count, prefix="") -> list[dict[str, str]]:
    return [{"id": f"{prefix}{i}", "prompt": f"{prefix}{i}+{i}=", "answer": str(2 * i)} for i in range(count)]


@pytest.fixture
def task(request, tmp_path) -> Task:
    kind = task_class(request.param)
    if kind is JsonLines:
        return JsonLines(path=write_lines(tmp_path / "data.jsonl", rows(400)))
    return kind()


every_task = pytest.mark.parametrize("task", STEMS, indirect=True)


# ------------------------------------------------------------------------------------------------------------ contract
@every_task
def test_a_task_is_a_frozen_dataclass_with_primitive_settings_and_defaults(task):
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.reward_kind = "exact"
    for field in dataclasses.fields(task):
        assert field.type in ("str", "int", "float", "bool")
        assert field.default is not dataclasses.MISSING
    assert task.name in STEMS
    assert type(task).__doc__


@every_task
@pytest.mark.parametrize("split", SPLITS)
def test_item_i_is_a_function_of_split_seed_and_i(task, split):
    whole = task.examples(split, 12, seed=3)
    assert whole == task.examples(split, 12, seed=3)
    assert whole[5:9] == task.examples(split, 4, seed=3, start=5)
    assert whole[:1] == task.examples(split, 1, seed=3)
    assert len({example.id for example in whole}) == 12
    assert whole != task.examples(split, 12, seed=4)


@every_task
def test_a_seed_is_another_stream_not_a_shifted_one(task):
    one, other = task.examples("train", 40, seed=1), task.examples("train", 40, seed=2)
    assert [e.prompt for e in one[1:]] != [e.prompt for e in other[:-1]]


@every_task
def test_train_and_eval_prompts_are_disjoint_for_all_pairs_of_seeds(task):
    train = [e for seed in range(4) for e in task.examples("train", 300, seed)]
    evaluation = [e for seed in range(4) for e in task.examples("eval", 40, seed)]
    assert overlap(train, evaluation) == 0.0
    assert all(split_of(e.prompt) == "train" for e in train)
    assert all(split_of(e.prompt) == "eval" for e in evaluation)


@every_task
@pytest.mark.parametrize("kind", ["share", "exact"])
def test_the_answer_is_worth_1_and_garbage_between_0_and_1(task, kind):
    task = dataclasses.replace(task, reward_kind=kind)
    for example in task.examples("train", 20, seed=0):
        assert task.reward(example, example.answer) == 1.0
        assert task.exact(example, example.answer)
        for text in GARBAGE:
            assert 0.0 <= task.reward(example, text) < 1.0
            assert not task.exact(example, text)


@every_task
def test_demonstrations_are_wrong_in_the_share_asked_for(task):
    examples = task.examples("train", 200, seed=0)
    assert [task.demonstration(e, 0.0, random.Random(0)) for e in examples] == [e.answer for e in examples]
    rng = random.Random(0)
    wrong = total = 0
    for example in examples:
        shown = task.demonstration(example, 0.3, rng)
        assert len(shown) == len(example.answer)
        assert set(shown) <= set(task.alphabet)
        wrong += sum(a != b for a, b in zip(shown, example.answer, strict=True))
        total += len(shown)
    assert abs(wrong / total - 0.3) < 4 * (0.3 * 0.7 / total) ** 0.5
    always = [task.demonstration(e, 1.0, rng) for e in examples]
    assert all(a != b for e, d in zip(examples, always, strict=True) for a, b in zip(e.answer, d, strict=True))


@every_task
def test_unknown_splits_negative_counts_and_unknown_rewards_are_refused(task):
    with pytest.raises(ValueError, match=r"test.*train or eval"):
        task.examples("test", 1, 0)
    with pytest.raises(ValueError, match="count is -1"):
        task.examples("train", -1, 0)
    with pytest.raises(ValueError, match="start is -1"):
        task.examples("train", 1, 0, start=-1)
    with pytest.raises(ValueError, match="one of share, exact"):
        dataclasses.replace(task, reward_kind="shar")


@every_task
def test_every_setting_is_a_determinant(task):
    facts = task.determinants()
    assert facts["task"] == task.name
    assert {field.name for field in dataclasses.fields(task)} <= set(facts)


# --------------------------------------------------------------------------------------------------------------- cases
def test_items_do_not_change_between_versions():
    # a study resumed after an upgrade must see the same prompts
    assert SortDigits().examples("train", 1, 0) == [Example("train-0-0", "5717394166=", "1134566779")]
    assert Reverse().examples("train", 1, 0) == [Example("train-0-0", "uhdyeb=", "beydhu")]
    assert ChainSum().examples("train", 1, 0) == [Example("train-0-0", "7+2+4=", "13")]


def test_answers_are_right():
    for example in SortDigits(length=7).examples("train", 20, 0):
        assert len(example.answer) == 7
        assert list(example.answer) == sorted(example.prompt[:-1])
    for example in Reverse(min_length=2, max_length=5).examples("train", 20, 0):
        assert 2 <= len(example.answer) <= 5
        assert example.answer[::-1] + "=" == example.prompt
    for example in ChainSum(terms=4, digits=3).examples("train", 20, 0):
        numbers = [int(n) for n in example.prompt[:-1].split("+")]
        assert len(numbers) == 4
        assert max(numbers) < 1000
        assert int(example.answer) == sum(numbers)


def test_reward_by_position_worked_by_hand():
    assert position_share("1234", "1234") == 1.0
    assert position_share("1234", "12") == 0.5
    assert position_share("1234", "9934") == 0.5
    assert position_share("1234", "12345678") == 0.5
    assert position_share("1234", "") == 0.0
    exact = SortDigits(reward_kind="exact")
    assert exact.reward(Example("0", "21=", "12"), "13") == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SortDigits(length=0), "length is 0"),
        (lambda: Reverse(min_length=0), "min_length is 0"),
        (lambda: Reverse(min_length=5, max_length=4), "max_length is 4, below min_length 5"),
        (lambda: ChainSum(terms=0), "terms is 0"),
        (lambda: ChainSum(digits=0), "digits is 0"),
    ],
)
def test_impossible_difficulties_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_prompt_space_without_evaluation_prompts_is_refused_not_searched_for_ever():
    class OnlyOne(SortDigits):
        def draw(self, rng):
            return "0=", "0"

    assert split_of("0=") == "train"
    assert len(OnlyOne().examples("train", 2, 0)) == 2
    with pytest.raises(ValueError, match="drawn prompts belongs to eval"):
        OnlyOne().examples("eval", 1, 0)


def test_overlap_is_a_share():
    one, two, three = (Example(str(i), p, "a") for i, p in enumerate(["x", "y", "x"]))
    assert overlap([one, two], [three]) == 1.0
    assert overlap([two], [one, two]) == 0.5
    assert overlap([one], []) != overlap([one], [])  # nan


# --------------------------------------------------------------------------------------------------------------- jsonl
def test_jsonl_gives_each_prompt_once_an_epoch_in_an_order_of_the_seed(tmp_path):
    task = JsonLines(
        path=write_lines(tmp_path / "a.jsonl", rows(30)), eval_path=write_lines(tmp_path / "b.jsonl", rows(7, "e"))
    )
    first, second = task.examples("train", 30, 0), task.examples("train", 30, 0, start=30)
    assert {e.id for e in first} == {e.id for e in second} == {str(i) for i in range(30)}
    assert first != second
    assert len(task.examples("eval", 7, 0)) == 7


def test_jsonl_is_read_once(tmp_path):
    task = JsonLines(path=write_lines(tmp_path / "a.jsonl", rows(400)))
    before = task.examples("train", 5, 0)
    (tmp_path / "a.jsonl").unlink()
    assert task.examples("train", 5, 0) == before


def test_jsonl_determinants_follow_the_file_not_its_name_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    one = JsonLines(path=write_lines(path, rows(400))).determinants()
    assert one == JsonLines(path=str(path)).determinants()
    assert one != JsonLines(path=write_lines(path, rows(401))).determinants()


def test_jsonl_ignores_white_space_around_a_completion_and_keeps_line_separators_inside_strings(tmp_path):
    line = json.dumps({"id": "1", "prompt": "a\u2028b", "answer": " 4 "}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    task = JsonLines(path=str(tmp_path / "a.jsonl"), eval_path=write_lines(tmp_path / "b.jsonl", rows(1)))
    (example,) = task.examples("train", 1, 0)
    assert example.prompt == "a\u2028b"
    assert task.exact(example, " 4\n")


GOOD = '{"id": "1", "prompt": "p", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        (GOOD + "\n" + GOOD, "line 2: not JSON"),
        (GOOD + '{"id": ', "line 2: not JSON"),
        (GOOD + "[1]", "line 2: holds list"),
        ("[" * 10000, r"line 1: not JSON \(nested too deeply\)"),
        (GOOD + '{"id": "2", "prompt": "p"}', r"line 2: has the keys \['id', 'prompt'\]"),
        (GOOD + '{"id": 2, "prompt": "p", "answer": "a"}', "line 2: id is 2; write a string"),
        (GOOD + '{"id": "2", "prompt": "p", "answer": " "}', "line 2: answer is ' '"),
        (GOOD + GOOD, "line 2: id '1' is taken by line 1"),
        (GOOD, "none of them falls to"),
    ],
)
def test_jsonl_names_the_bad_line_and_the_reason(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        JsonLines(path=str(path)).examples("train", 1, 0)


def test_jsonl_refuses_missing_files_and_shared_prompts(tmp_path):
    with pytest.raises(ValueError, match=r"set task\.path"):
        JsonLines().examples("train", 1, 0)
    with pytest.raises(ValueError, match=r"cannot read .*nowhere.jsonl"):
        JsonLines(path=str(tmp_path / "nowhere.jsonl")).examples("train", 1, 0)
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match="not UTF-8"):
        JsonLines(path=str(tmp_path / "latin.jsonl")).examples("train", 1, 0)
    path = write_lines(tmp_path / "a.jsonl", rows(3))
    with pytest.raises(ValueError, match="share 3 prompts"):
        JsonLines(path=path, eval_path=path).examples("train", 1, 0)
