"""Two checkpoints compared as a user would; bad input is one line and exit code 2."""

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_rl.comparison import Comparison, ComparisonError, compare_checkpoints, figures, main
from moe_rl.comparison.measuring import require_same_architecture
from moe_rl.comparison.numbers import COLUMNS, LEGEND, pooled
from moe_rl.drift import compare
from moe_rl.models.build import Checkpoint, Tiny
from moe_rl.policy import routing_of
from moe_rl.policy_folder import save_policy
from moe_rl.routers.base import install
from moe_rl.routers.binned import Binned
from moe_rl.routing_trace import RoutingTrace
from moe_rl.traces import TraceHeader, padded, read_traces

ROOT = Path(__file__).parent.parent
SMALL = {"layers": 3, "hidden_size": 32, "experts": 8, "top_k": 2, "expert_size": 16, "initializer_range": 0.2}
TEXTS = ["what is 12+34?", "sort 9 1 7 2", "a", "the quick brown fox jumps over the lazy dog", "1+1=2"]


def save(folder, seed=0, change=0.0, drop_token=False, **settings):
    """A tiny checkpoint; `change` moves every weight by that share of its tensor's spread."""
    model, tokenizer = Tiny(**(SMALL | settings)).build(seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if change and parameter.numel() > 1:
                parameter += change * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if drop_token:
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace('"z"', '"Z"'))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    (root / "texts.txt").write_text("\n\n".join(TEXTS) + "\n")
    save(root / "old")
    save(root / "new", change=0.05)
    return root


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(figures, "draw_all", lambda *args: [])


@pytest.fixture(scope="module")
def compared(folders, tmp_path_factory):
    """(table by layer, output folder) of one comparison, without figures."""
    out = tmp_path_factory.mktemp("compared") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw_all", lambda *args: [])
        return run(folders, out, router_logits="true", min_occurrences=4), out


def words(folders, out, **more):
    settings = {"old": folders / "old", "new": folders / "new", "text": folders / "texts.txt", "out": out}
    return [f"{key}={value}" for key, value in (settings | {"dtype": "float32", "batch_size": 2} | more).items()]


def run(folders, out, **more):
    return compare_checkpoints(Comparison.parse(words(folders, out, **more)))


# ------------------------------------------------------------------------------------------------------------- results
def test_as_a_user_would(folders, tmp_path):
    out = tmp_path / "results" / "comparison"
    command = [sys.executable, "experiments/compare_checkpoints.py", *words(folders, out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "slot change" in done.stdout
    pictures = [f"{name}.{kind}" for name in ("drift", "load", "co_activation") for kind in ("png", "svg")]
    files = ["comparison.json", "layers.csv", "numbers.parquet", "new.traces.parquet", "old.traces.parquet", *pictures]
    assert sorted(path.name for path in out.iterdir()) == sorted(files)
    assert [path.name for path in out.parent.iterdir()] == ["comparison"]
    for name in pictures[::2]:
        assert len(np.unique(matplotlib.image.imread(out / name)[..., :3].sum(axis=-1))) > 20
    facts = json.loads((out / "comparison.json").read_text())
    assert (facts["num_layers"], facts["top_k"], facts["num_experts"]) == (3, 2, 8)
    assert facts["tokens"] == sum(map(len, TEXTS))


def test_the_numbers_are_those_of_a_plain_comparison(folders, compared):
    layers, out = compared
    table = pd.read_parquet(out / "numbers.parquet")
    models = [AutoModelForCausalLM.from_pretrained(folders / name) for name in ("old", "new")]
    _, tokenizer = Tiny(**SMALL).build(0)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    old, new = (routing_of(model, batch["input_ids"], batch["attention_mask"]) for model in models)
    drift = compare(old, new)
    assert 0.01 < drift.slot_change < 0.5
    assert layers["slot_change"].tolist() == pytest.approx(drift.slot_change_L.tolist())
    assert layers["set_change"].tolist() == pytest.approx(drift.set_change_L.tolist())
    assert layers["first_changed"].tolist() == pytest.approx(drift.first_changed_L.tolist())
    assert layers["saturation"].tolist() == pytest.approx((1 - drift.slot_change_L).tolist())
    of_change = table[table["of"] == "change"].set_index("metric")["value"]
    assert of_change["deviation"].tolist() == pytest.approx(drift.deviation_K1.tolist())
    assert of_change["any_layer_change"] == pytest.approx(drift.any_layer_change)
    assert of_change["tokens_compared"] == drift.n == sum(map(len, TEXTS))
    for of, trace in (("old", old), ("new", new)):
        part = table[(table["of"] == of) & (table["metric"] == "load")]
        for layer in range(3):
            ids = trace.expert_ids_BSLK[trace.valid_BS][:, layer].flatten().long()
            assert part[part["layer"] == layer]["value"].tolist() == torch.bincount(ids, minlength=8).tolist()
        stored = padded(read_traces(out / f"{of}.traces.parquet"), batch["attention_mask"])
        assert torch.equal(stored.expert_ids_BSLK[stored.valid_BS], trace.expert_ids_BSLK[trace.valid_BS])


def test_the_table_is_tidy_and_explained(compared):
    table = pd.read_parquet(compared[1] / "numbers.parquet")
    assert tuple(table.columns) == COLUMNS
    assert set(table["metric"]) == set(LEGEND)
    assert set(table["of"]) == {"old", "new", "change"} | {
        f"noise/{check}" for check in ("batch_size", "left_padding", "decode", "experts_implementation")
    }
    keys = list(COLUMNS[:-1])
    assert not table.duplicated(keys).any()
    pairs = table[(table["metric"] == "co_activation") & (table["of"] == "old") & (table["layer"] == 0)]
    assert len(pairs) == 8 * 7
    sums = pairs.groupby("expert")["value"].sum(min_count=1).dropna()
    assert sums.tolist() == pytest.approx([1.0] * len(sums))  # K - 1 partners each
    vocabulary = table[table["metric"] == "vocabulary"]
    assert vocabulary["value"].between(0, 1, inclusive="right").all()
    text = "".join(TEXTS)
    _, tokenizer = Tiny(**SMALL).build(0)
    assert {text.count(tokenizer.decode([token])) >= 4 for token in vocabulary["token_id"].unique()} == {True}
    entropy = table[table["metric"] == "router_entropy"]["value"]
    assert len(entropy) == 6
    assert entropy.between(0, np.log(8)).all()


def test_the_noise_floor_is_0_in_float32_and_equal_checkpoints_do_not_differ(folders, tmp_path, undrawn):
    layers = run(folders, tmp_path / "out", new=folders / "old")
    for column in ("slot_change", "set_change", "noise_slot_change", "noise_set_change"):
        assert layers[column].tolist() == [0.0] * 3
    assert layers["saturation"].tolist() == [1.0] * 3
    assert layers["unrelated"].tolist() == [0.75] * 3


def test_the_batch_size_changes_no_routing_in_float32(folders, tmp_path, undrawn, compared):
    again = run(folders, tmp_path / "out", batch_size=5, router_logits="true", min_occurrences=4)
    pd.testing.assert_frame_equal(again, compared[0])
    with pytest.raises(ComparisonError, match="exists already"):
        run(folders, tmp_path / "out")


def test_one_model_is_in_memory_at_a_time(folders, tmp_path, undrawn, monkeypatch):
    alive = []
    build = Checkpoint.build

    def counted(self, seed):
        gc.collect()
        alive.append(sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects()))
        return build(self, seed)

    monkeypatch.setattr(Checkpoint, "build", counted)
    run(folders, tmp_path / "out", sequences=1)
    assert alive[1] == alive[0]


def test_pooling_parts_gives_the_drift_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.rand(6, 9, 4, 8, generator=generator).topk(2, -1).indices for _ in range(2)]
    valid = torch.rand(6, 9, generator=generator) > 0.3
    old, new = (RoutingTrace.from_ids(part, valid, tuple("abcd"), 8) for part in ids)
    parts = [compare(old[rows], new[rows]).row() for rows in (slice(0, 1), slice(1, 6))]
    whole = compare(old, new).row()
    for key, value in pooled(parts).items():
        assert np.allclose(value, whole[key]), key


@pytest.mark.parametrize("text", ["reverse", "texts.jsonl"])
def test_tasks_and_json_lines_are_texts_too(folders, tmp_path, undrawn, text):
    if text.endswith("jsonl"):
        text = tmp_path / text
        text.write_text('{"text": "abc"}\n{"prompt": "1+1=", "answer": "2"}\n{"id": 3, "text": "de", "prompt": 1}\n')
    run(folders, tmp_path / "out", text=text, sequences=3)
    rows = list(read_traces(tmp_path / "out" / "old.traces.parquet"))
    assert len(rows) == 3
    if not isinstance(text, str):
        _, tokenizer = Tiny(**SMALL).build(0)
        assert [tokenizer.decode(row.token_ids_T) for row in rows] == ["abc", "1+1=2", "de"]


def test_a_family_with_another_gate_is_compared_too(tmp_path, undrawn):
    for name, change in (("old", 0.0), ("new", 0.05)):
        save(tmp_path / name, change=change, family="deepseek_v3")
    layers = run(tmp_path, tmp_path / "out", text="sort_digits", sequences=4)
    assert 0 < layers["slot_change"].mean() < 0.75
    assert layers["noise_slot_change"].tolist() == [0.0] * 3


# ----------------------------------------------------------------------------------------------------------- bad input
def refused(capsys, arguments):
    """The one line on stderr."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"old": "/nowhere/model"}, "old: there is no folder '/nowhere/model'"),
        ({"new": "./nowhere"}, "new: there is no folder './nowhere'"),
        ({"new": "nobody/nothing"}, "new: cannot load the tokenizer of 'nobody/nothing'"),
        ({"text": "absent.txt"}, "cannot read absent.txt: No such file"),
        ({"text": "sort_digit"}, "text is 'sort_digit'; give a file .txt or .jsonl, or a task: chain_sum"),
        ({"text": "jsonl"}, "text=jsonl: the jsonl task has no file"),
        ({"old": ""}, "old is not set; usage: python experiments"),
        ({"dtype": "float16"}, "dtype is 'float16'; choose one of float32, bfloat16"),
        ({"batch_size": "many"}, "batch_size is 'many'; set it to a whole number"),
        ({"batch_size": 0}, "batch_size is 0; set it to 1 or more"),
        ({"router_logits": "yes"}, "router_logits is 'yes'; set it to true or false"),
        ({"outt": "x"}, "cannot use 'outt=x'; options are old=, new="),
        ({"device": "cuda"}, "no GPU can be used here; set device=cpu"),
    ],
)
def test_bad_settings_are_one_line(folders, tmp_path, capsys, more, message):
    if "device" in more and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert message in refused(capsys, words(folders, tmp_path / "out", **more))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "bad.jsonl line 2: not JSON"),
        ("bad.jsonl", b'{"text": "a"}\n\n["b"]\n', 'bad.jsonl line 3: write an object with a "text"'),
        ("bad.jsonl", b'{"prompt": "a"}\n', 'bad.jsonl line 1: write an object with a "text"'),
        ("bad.jsonl", b'{"text": 5}\n', 'bad.jsonl line 1: write an object with a "text"'),
        ("bad.txt", b"fine\nfine\n\xff\xfe\n", "bad.txt line 3: not UTF-8"),
        ("bad.txt", b"fine\nNOT\n", "bad.txt line 2: the tokenizer does not know ['N', 'O', 'T']"),
        ("bad.txt", b" \n\n", "bad.txt is empty"),
        ("bad.txt", b"a" * 300, "old was made for 256 tokens, a text has 300; set max_tokens=256"),
    ],
)
def test_bad_text_is_named_by_line(folders, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refused(capsys, words(folders, tmp_path / "out", text=tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "dense"}, "new: Qwen3ForCausalLM is dense, it routes nothing"),
        ({"experts": 16}, "new is Qwen3MoeForCausalLM: 3 MoE layers from model.layers.0.mlp.gate, K = 2, E = 16"),
        ({"drop_token": True}, "different tokenizers (51 and 51 tokens, the first to differ is 39: 'z' and 'Z')"),
    ],
)
def test_checkpoints_that_cannot_be_compared_are_refused(folders, tmp_path, capsys, undrawn, settings, message):
    other = save(tmp_path / "other", **settings)
    assert message in refused(capsys, words(folders, tmp_path / "out", new=other))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize(
    "change",
    [{"top_k": 3}, {"num_experts": 16}, {"model_class": "Other"}, {"layer_names": ("a",)}, {"layer_names": ("a", "c")}],
)
def test_another_architecture_is_refused(change):
    header = TraceHeader(("a", "b"), 8, 2, "", "Model")
    require_same_architecture(header, header)
    with pytest.raises(ComparisonError, match="compare checkpoints of one architecture"):
        require_same_architecture(header, dataclasses.replace(header, **change))


def test_a_folder_without_weights_is_refused(folders, tmp_path, capsys):
    other = save(tmp_path / "other")
    (other / "model.safetensors").unlink()
    error = refused(capsys, words(folders, tmp_path / "out", new=other))
    assert "has no *.safetensors" in error
    assert error.startswith("error: new: ")


def test_no_words_at_all_print_the_usage(capsys):
    assert "text=<.txt|.jsonl|name of a task>" in refused(capsys, [])


def test_settings_come_from_words():
    settings = Comparison.parse(["old=a=b", "new=c", "text=t", "sequences=5", "router_logits=true"])
    assert (settings.old, settings.sequences, settings.router_logits) == ("a=b", 5, True)
    with pytest.raises(ComparisonError, match="cannot use 'old'"):
        Comparison.parse(["old"])


def test_a_kept_policy_is_compared_with_the_router_variant_it_was_trained_with(folders, tmp_path, undrawn):
    model, tokenizer = Tiny(**SMALL).build(0)
    install(model, Binned(width=0.2))
    save_policy(tmp_path / "kept", model, tokenizer, Binned(width=0.2))
    native, binned = (run(folders, tmp_path / name, new=folders / new) for name, new in
                      (("same", "old"), ("binned", tmp_path / "kept")))  # fmt: skip
    assert native["slot_change"].max() == 0
    assert binned["slot_change"].min() > 0
