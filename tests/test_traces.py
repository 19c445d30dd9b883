"""Trace files hold exactly what was recorded, or say that they do not; other systems' arrays never shift."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from models import sets_differ, tiny, tokens

from moe_rl.policy import routing_of
from moe_rl.recording import record
from moe_rl.records import Rollouts
from moe_rl.replaying import replay
from moe_rl.routing_trace import RoutingError, RoutingTrace
from moe_rl.traces import (
    TraceError,
    TraceWriter,
    files,
    from_layout,
    merge_turns,
    padded,
    read_header,
    read_traces,
    to_pandas,
)

NAMES = ("model.layers.1.mlp.gate", "model.layers.2.mlp.gate", "model.layers.3.mlp.gate")


def random_trace(batch=3, width=4, experts=512, top_k=2, layers=2, source="new", update=0, seed=0):
    """(trace, attention): left-padded by 1, 0, 2, ...; the last column was never forwarded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(batch, width, layers, experts, generator=generator).topk(top_k, -1).indices
    attention = torch.ones(batch, width, dtype=torch.bool)
    for row in range(batch):
        attention[row, : (1, 0, 2)[row % 3]] = False
    valid = attention.clone()
    valid[:, -1] = False
    names = tuple(f"model.layers.{layer}.mlp.gate" for layer in range(layers))
    return RoutingTrace.from_ids(ids, valid, names, experts, source, update), attention


def writer_for(path, trace, **more):
    return TraceWriter(path, trace.layer_names, trace.num_experts, trace.top_k, **more)


def write(path, trace, attention, step=0, **more):
    with writer_for(path, trace) as writer:
        writer.add(trace, attention, step=step, **more)
    return path


def contents(path, **which):
    return [
        (r.header, r.step, r.update, r.source, r.sequence, r.expert_ids_TLK.tolist(), r.valid_T.tolist(),
         None if r.token_ids_T is None else r.token_ids_T.tolist())
        for r in read_traces(path, **which)
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- round trip
@pytest.mark.parametrize("experts", [8, 256, 257, 512])
def test_ids_come_back_exactly_in_either_width(tmp_path, experts):
    """Case A14."""
    trace, attention = random_trace(experts=experts)
    trace.expert_ids_BSLK[1, 0, 0] = torch.tensor([experts - 1, min(255, experts - 2)], dtype=torch.int16).to(
        trace.expert_ids_BSLK.dtype
    )
    path = write(tmp_path / "t.parquet", trace, attention)
    back = padded(read_traces(path), attention)
    assert torch.equal(back.expert_ids_BSLK, trace.expert_ids_BSLK)
    assert back.expert_ids_BSLK.dtype == trace.expert_ids_BSLK.dtype
    assert torch.equal(back.valid_BS, trace.valid_BS)
    assert (back.layer_names, back.num_experts, back.source) == (trace.layer_names, experts, "new")
    assert read_header(path).id_dtype == ("uint8" if experts <= 256 else "int16")


def test_the_last_sampled_token_is_written_as_unknown_and_padding_not_at_all(tmp_path):
    trace, attention = random_trace()
    ids = torch.arange(12).view(3, 4)
    rows = list(read_traces(write(tmp_path / "t.parquet", trace, attention, tokens_BS=ids)))
    assert [row.valid_T.tolist() for row in rows] == [[True, True, False], [True] * 3 + [False], [True, False]]
    assert [row.token_ids_T.tolist() for row in rows] == [[1, 2, 3], [4, 5, 6, 7], [10, 11]]
    assert padded(rows).valid_BS.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]


def test_what_is_recorded_on_a_model_is_replayed_from_the_file(tmp_path):
    """The whole way: record, write, read, pad on the right, replay on another model's weights."""
    model, other = tiny(), tiny(seed=1)
    ids, mask = tokens(3, 6)
    path = tmp_path / "t.parquet"
    write(path, routing_of(model, ids, mask, "rollout"), mask, tokens_BS=ids)
    rows = list(read_traces(path, source="rollout"))
    trace = padded(rows)
    right = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(r.token_ids_T) for r in rows], batch_first=True)
    with replay(other, trace), record(other) as recorder:
        other(right, attention_mask=trace.valid_BS.long())
    assert not sets_differ(recorder.trace, trace)[trace.valid_BS].any()
    assert sets_differ(routing_of(other, right, trace.valid_BS), trace)[trace.valid_BS].any()


def test_rows_are_chosen_by_step_sequence_pass_and_update(tmp_path):
    path = tmp_path / "t.parquet"
    first, attention = random_trace(source="old")
    with writer_for(path, first, model_class="Qwen3MoeForCausalLM") as writer:
        for step in (1, 2):
            for source, update in (("old", 0), ("new", 1), ("new", 2)):
                trace, _ = random_trace(source=source, update=update, seed=step * 10 + update)
                writer.add(trace, attention, step=step, sequences=[7, 3, 5])
    assert len(contents(path)) == 18
    assert [row[:5][1:] for row in contents(path, step=2, source="new", sequence=3)] == [
        (2, 1, "new", 3), (2, 2, "new", 3)]  # fmt: skip
    assert len(contents(path, update=0)) == 6
    assert contents(path, step=9) == []
    with pytest.raises(RoutingError, match="choose one source and update"):
        padded(read_traces(path, step=1))
    with pytest.raises(RoutingError, match="0 records"):
        padded(read_traces(path, step=9))
    header = read_header(path)
    assert header.model_class == "Qwen3MoeForCausalLM"
    assert {"torch", "transformers", "python"} <= header.versions.keys()


def test_many_row_groups_read_like_one(tmp_path, monkeypatch):
    trace, attention = random_trace(batch=30)
    whole = contents(write(tmp_path / "one.parquet", trace, attention))
    monkeypatch.setattr(files, "ROW_GROUP_BYTES", 100)
    path = write(tmp_path / "many.parquet", trace, attention)
    assert pq.ParquetFile(path).num_row_groups > 5
    assert contents(path) == whole
    assert contents(path, sequence=17) == whole[17:18]


def test_a_writer_holds_one_row_group_however_long_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROW_GROUP_BYTES", 1000)
    trace, attention = random_trace()
    with writer_for(tmp_path / "t.parquet", trace) as writer:
        held = []
        for step in range(200):
            writer.add(trace, attention, step=step)
            held.append(writer.held)
    assert max(held) < 1100
    assert len(contents(tmp_path / "t.parquet")) == 600


def test_pandas_has_a_row_per_token_layer_and_slot(tmp_path):
    trace, attention = random_trace()
    path = write(tmp_path / "t.parquet", trace, attention, step=3, tokens_BS=torch.arange(12).view(3, 4))
    table = to_pandas(read_traces(path))
    assert len(table) == int(attention.sum()) * 2 * 2
    one = table[(table["sequence"] == 1) & (table["position"] == 2) & (table["layer"] == 1)]
    assert one["expert"].tolist() == trace.expert_ids_BSLK[1, 2, 1].tolist()
    assert one["token_id"].tolist() == [6, 6]
    assert table["expert"].isna().sum() == 3 * 2 * 2  # never 0: 0 is an expert
    assert table[table["expert"].isna()]["token_id"].unique().tolist() == [3, 7, 11]
    assert set(table.columns) == set(to_pandas([]).columns)
    without = to_pandas(read_traces(write(tmp_path / "u.parquet", trace, attention)))
    assert without["token_id"].isna().all()


def test_the_file_is_plain_parquet(tmp_path):
    trace, attention = random_trace()
    table = pq.read_table(write(tmp_path / "t.parquet", trace, attention, step=4))
    assert table.column("step").to_pylist() == [4] * 3
    row = np.frombuffer(table.column("expert_ids")[1].as_py(), "<i2").reshape(4, 2, 2)
    assert row[0].tolist() == trace.expert_ids_BSLK[1, 0].tolist()
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0).column(4).compression == "ZSTD"


# -------------------------------------------------------------------------------------------------------- torn, damaged
def test_a_torn_file_never_carries_the_final_name(tmp_path):
    trace, attention = random_trace()
    path = tmp_path / "t.parquet"

    def cut_off():
        with writer_for(path, trace) as writer:
            writer.add(trace, attention, step=0)
            assert not path.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert os.listdir(tmp_path) == []
    write(path, trace, attention)
    assert os.listdir(tmp_path) == ["t.parquet"]
    with pytest.raises(TraceError, match=r"t\.parquet exists"):
        writer_for(path, trace)


def test_any_damage_is_an_error_or_does_not_show(tmp_path):
    """Cut off at every byte, and one bit flipped in every byte: an error that names the file, or the right answer."""
    trace, attention = random_trace(batch=2, width=3)
    path, broken = tmp_path / "t.parquet", tmp_path / "broken.parquet"
    write(path, trace, attention, tokens_BS=torch.arange(6).view(2, 3))
    right, data = contents(path), path.read_bytes()
    bits = random.Random(0)
    flipped = (data[:i] + bytes([byte ^ (1 << bits.randrange(8))]) + data[i + 1 :] for i, byte in enumerate(data))
    messages = []
    for damaged in [*(data[:length] for length in range(len(data))), *flipped]:
        broken.write_bytes(damaged)
        try:
            assert contents(broken) == right
        except TraceError as error:
            messages.append(str(error))
    assert all("broken.parquet" in message for message in messages)
    assert len(messages) > 1.5 * len(data)


def test_a_path_is_no_table(tmp_path):
    with pytest.raises(TraceError, match=r"to_pandas\(read_traces\('t.parquet'\)\)"):
        to_pandas(Path("t.parquet"))


def rewritten(path, change):
    """The file with one column or piece of metadata changed by another program, and its own checksums as they were."""
    file = pq.ParquetFile(path)
    rows, about = file.read().to_pylist(), dict(file.metadata.metadata)
    change(rows, about)
    table = pa.Table.from_pylist(rows, schema=file.schema_arrow).replace_schema_metadata(about)
    pq.write_table(table, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, about: rows[0].update(expert_ids=rows[1]["expert_ids"]), "damaged at step 0, sequence 0"),
        (lambda rows, about: rows[0].update(valid=b"\1" * len(rows[0]["valid"])), "damaged at step 0, sequence 0"),
        (lambda rows, about: rows[0].update(token_ids=[1]), "damaged at step 0, sequence 0"),
        (lambda rows, about: rows[0].update(step=1), "do not match the checksum"),
        (lambda rows, about: rows.pop(), "2 rows do not match the checksum over 3"),
        (lambda rows, about: rows.reverse(), "do not match the checksum"),
        (lambda rows, about: about.update({b"moe_rl.trace": about[b"moe_rl.trace"].replace(b"512", b"500")}),
         "metadata do not match"),
        (lambda rows, about: about.update({b"moe_rl.trace.format": b"2"}), "has trace format 2, this version reads 1"),
        (lambda rows, about: about.clear(), "no trace file"),
    ],
)  # fmt: skip
def test_a_changed_file_is_refused_by_name(tmp_path, change, message):
    trace, attention = random_trace()
    path = write(tmp_path / "t.parquet", trace, attention)
    rewritten(path, lambda rows, about: None)
    assert len(contents(path)) == 3
    rewritten(path, change)
    with pytest.raises(TraceError, match=rf"t\.parquet.*{message}"):
        contents(path)


def test_a_file_that_is_missing_or_something_else_is_refused_by_name(tmp_path):
    with pytest.raises(TraceError, match=r"no trace file .*absent\.parquet"):
        read_traces(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(TraceError, match=r"text\.parquet is damaged"):
        read_traces(tmp_path / "text.parquet")


def test_a_writer_refuses_another_model_and_impossible_rows(tmp_path):
    trace, attention = random_trace()
    with writer_for(tmp_path / "t.parquet", trace) as writer:
        with pytest.raises(TraceError, match="2 of 512 experts in 2 layers"):
            writer.add(random_trace(experts=8)[0], attention, step=0)
        with pytest.raises(TraceError, match="1 sequence numbers"):
            writer.add(trace, attention, step=0, sequences=[1])
        twice = RoutingTrace(torch.zeros_like(trace.expert_ids_BSLK), trace.valid_BS, trace.layer_names, 512)
        with pytest.raises(RoutingError, match="same expert twice"):
            writer.add(twice, attention, step=0)
    assert contents(tmp_path / "t.parquet") == []


# --------------------------------------------------------------------------------------------------- foreign layouts
def layout(*rows, layers=3, top_k=2):
    """[tokens, layers, K]: token t chooses experts r, r + 1, ... in every layer, for r in rows."""
    return np.array(rows)[:, None, None] + np.zeros((1, layers, 1), int) + np.arange(top_k)


def test_one_row_less_leaves_the_last_token_unknown_and_all_rows_leave_none():
    """Case A1: prompts of 5 tokens, 6 sampled: 10 rows each, row 10 unknown; scoring only: every row known."""
    ten = layout(*range(10))
    trace = from_layout([ten, ten], [11, 11], NAMES, 16)
    assert trace.valid_BS.tolist() == [[True] * 10 + [False]] * 2
    assert trace.expert_ids_BSLK[1, 9, 2].tolist() == [9, 10]
    assert from_layout([layout(*range(5))], [5], NAMES, 16).valid_BS.all()


@pytest.mark.parametrize("short", [0, 1])
def test_sequences_behind_each_other_are_cut_by_their_lengths(short):
    lengths = [3, 5]
    parts = [layout(*range(n - short)) for n in lengths]
    one = from_layout(np.concatenate(parts), lengths, NAMES, 16)
    listed = from_layout(parts, lengths, NAMES, 16)
    assert torch.equal(one.expert_ids_BSLK, listed.expert_ids_BSLK)
    assert one.valid_BS.sum(1).tolist() == [3 - short, 5 - short]


def test_rows_go_to_the_real_columns_of_a_mask():
    """Case A5: padded prompt 4, real prompt 2, 3 sampled: columns 2..5, column 6 unknown."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]]).bool()
    trace = from_layout([layout(1, 2, 3, 4)], [5], NAMES, 16, attention_BS=mask)
    assert trace.valid_BS.tolist() == [[False, False, True, True, True, True, False]]
    assert trace.expert_ids_BSLK[0, 2:6, 0, 0].tolist() == [1, 2, 3, 4]
    with pytest.raises(RoutingError, match="do not fit a mask"):
        from_layout([layout(1, 2, 3)], [4], NAMES, 16, attention_BS=mask)


@pytest.mark.parametrize("rows", [2, 5])
def test_any_other_number_of_rows_is_refused(rows):
    """Case A17: a pre-filled cache omits rows; they must not shift."""
    with pytest.raises(RoutingError, match=f"sequence 1 has 4 tokens, {rows} rows"):
        from_layout([layout(1, 2, 3), layout(*range(rows))], [4, 4], NAMES, 16)


def test_all_decoder_layers_are_mapped_by_the_number_in_the_name():
    """Case A11: [dense, moe, moe, moe]: slot 2 belongs to layer 2; two slots belong to nothing."""
    slots = np.arange(4)[None, :, None] * 2 + np.arange(2)[None, None]  # slot s chooses experts 2s, 2s + 1
    trace = from_layout([slots.repeat(3, 0)], [3], NAMES, 16, num_decoder_layers=4)
    assert trace.layer_names == NAMES
    assert trace.expert_ids_BSLK[0, 0].tolist() == [[2, 3], [4, 5], [6, 7]]
    moe_only = from_layout([slots[:, 1:].repeat(3, 0)], [3], NAMES, 16, num_decoder_layers=4)
    assert torch.equal(moe_only.expert_ids_BSLK, trace.expert_ids_BSLK)
    with pytest.raises(RoutingError, match="the array has 2 layers, the model 3 MoE layers of 4 decoder"):
        from_layout([slots[:, :2].repeat(3, 0)], [3], NAMES, 16, num_decoder_layers=4)
    with pytest.raises(RoutingError, match="an unknown number of decoder layers"):
        from_layout([slots.repeat(3, 0)], [3], NAMES, 16)


@pytest.mark.parametrize("names", [("a", "b", "c"), ("l.1.e.2", "l.2.e.2", "l.3.e.2"), ("l.7.g", "l.8.g", "l.9.g"),
                                   ("l.1.a", "l.1.b", "l.2.a")])  # fmt: skip
def test_layers_whose_names_do_not_tell_their_slot_are_refused(names):
    with pytest.raises(RoutingError, match="pass MoE layers only"):
        from_layout([layout(1, 2, layers=4)], [2], names, 16, num_decoder_layers=4)


def test_rows_of_zeros_are_unknown_only_when_the_caller_says_so():
    """Case A6: a zero row would silently replay expert 0, K times."""
    rows = layout(1, 2, 3, 4)
    rows[1] = 0
    with pytest.raises(RoutingError, match="same expert twice"):
        from_layout([rows], [4], NAMES, 16)
    trace = from_layout([rows], [4], NAMES, 16, missing="zeros")
    assert trace.valid_BS.tolist() == [[True, False, True, True]]
    rows[2, 0] = 5  # experts 5, 5: no filler, damage
    with pytest.raises(RoutingError, match="same expert twice"):
        from_layout([rows], [4], NAMES, 16, missing="zeros")


def test_rows_of_minus_one_are_unknown_only_when_the_caller_says_so():
    rows = layout(1, 2, 3, 4)
    rows[3] = -1
    with pytest.raises(RoutingError, match=r"outside 0\.\.15"):
        from_layout([rows], [4], NAMES, 16)
    assert from_layout([rows], [4], NAMES, 16, missing="minus_one").valid_BS.tolist() == [[True] * 3 + [False]]
    rows[0, 1] = -1
    with pytest.raises(RoutingError, match="row 0: routing is missing in some layers"):
        from_layout([rows], [4], NAMES, 16, missing="minus_one")
    known = [np.array([False, True, True, False])]
    assert from_layout([rows], [4], NAMES, 16, missing="minus_one", valid=known).valid_BS.sum() == 2


def test_one_expert_a_token_needs_to_be_told_which_rows_are_known():
    """Case A7."""
    rows = layout(0, 3, 0, top_k=1)
    for missing in ("none", "zeros"):
        with pytest.raises(RoutingError, match="K = 1"):
            from_layout([rows], [3], NAMES, 16, missing=missing)
    trace = from_layout([rows], [3], NAMES, 16, valid=[[True, True, False]])
    assert trace.valid_BS.tolist() == [[True, True, False]]
    assert trace.expert_ids_BSLK[0, 0].tolist() == [[0]] * 3
    rows[2] = -1
    assert torch.equal(from_layout([rows], [3], NAMES, 16, missing="minus_one").valid_BS, trace.valid_BS)


@pytest.mark.parametrize(
    ("ids", "message"), [([300, 255], None), ([511, 0], None), ([512, 0], "outside"), ([-2, 0], "outside")]
)
def test_large_ids_do_not_wrap(ids, message):
    """Case A14."""
    rows = np.array(ids, dtype=np.int32)[None, None].repeat(3, 1)
    if message:
        with pytest.raises(RoutingError, match=message):
            from_layout([rows], [1], NAMES, 512)
    else:
        assert from_layout([rows], [1], NAMES, 512).expert_ids_BSLK[0, 0, 0].tolist() == ids


def test_arrays_that_are_no_layout_are_refused():
    with pytest.raises(RoutingError, match="dtype float32"):
        from_layout([layout(1, 2).astype(np.float32)], [2], NAMES, 16)
    with pytest.raises(RoutingError, match="cannot be cut"):
        from_layout(layout(1, 2, 3), [2, 4], NAMES, 16)
    with pytest.raises(RoutingError, match="came with 2 token counts"):
        from_layout([layout(1, 2)], [2, 2], NAMES, 16)
    with pytest.raises(RoutingError, match="missing is 'zero'"):
        from_layout([layout(1, 2)], [2], NAMES, 16, missing="zero")


def turn(*rows, known):
    return from_layout([layout(*rows)], [len(rows)], NAMES, 16, valid=[known])


def test_a_later_turn_fills_the_row_that_an_earlier_one_lacked():
    """Case A2."""
    first = turn(1, 2, 9, known=[True, True, False])
    second = turn(1, 2, 3, 4, known=[True] * 4)
    merged = merge_turns([first, second])
    assert merged.valid_BS.all()
    assert merged.expert_ids_BSLK[0, :, 0, 0].tolist() == [1, 2, 3, 4]
    late = turn(7, 7, 3, 4, 5, known=[False, False, True, True, False])  # prefix taken from a cache
    assert merge_turns([first, late]).expert_ids_BSLK[0, :4, 0, 0].tolist() == [1, 2, 3, 4]
    assert merge_turns([first, late]).valid_BS.tolist() == [[True] * 4 + [False]]


def test_turns_that_disagree_raise_unless_one_is_chosen():
    first = turn(1, 2, 3, known=[True, True, False])
    second = turn(1, 5, 3, known=[True] * 3)
    with pytest.raises(RoutingError, match=r"turn 2 knows other experts .* at 1 tokens, first in sequence 0, column 1"):
        merge_turns([first, second])
    assert merge_turns([first, second], "earlier").expert_ids_BSLK[0, :, 0, 0].tolist() == [1, 2, 3]
    assert merge_turns([first, second], "later").expert_ids_BSLK[0, :, 0, 0].tolist() == [1, 5, 3]
    swapped = RoutingTrace(second.expert_ids_BSLK.flip(-1), second.valid_BS, NAMES, 16)
    assert merge_turns([second, swapped]).valid_BS.all()  # the same sets in another order agree


def test_turns_recorded_on_a_model_merge_to_its_full_sequence():
    model = tiny()
    ids, _ = tokens(2, 8, padded=False)
    with record(model) as recorder:
        model(ids[:, :4])
        model(ids[:, :7])
    merged = merge_turns(recorder.traces)
    assert not sets_differ(merged, routing_of(model, ids[:, :7], torch.ones(2, 7))).any()


# ------------------------------------------------------------------------------------------------------ traces of a run
def rollouts_for(model, routing=True):
    ids, mask = tokens(6, 8)
    trace = routing_of(model, ids, mask, "rollout") if routing else None
    flat = torch.zeros(6)
    return Rollouts(ids, mask.bool(), mask[:, 4:].bool(), flat, torch.zeros(6, 4), flat, flat, flat, trace)


def test_a_step_is_kept_with_its_passes_updates_and_rollout_numbers(tmp_path):
    from moe_rl.drift.meter import DriftMeter, DriftSettings

    model, rollouts = tiny(), rollouts_for(tiny())
    meter = DriftMeter(model, DriftSettings(rollouts=3, probe=0, trace_every=2), (torch.ones(1, 1), torch.ones(1, 1)))
    meter.begin_step(4, rollouts)
    model.model.layers[0].mlp.gate.weight.data.neg_()
    meter.after_update(4, 1)
    for step in range(1, 5):
        meter.write_traces(tmp_path, step)
    assert sorted(os.listdir(tmp_path / "traces")) == ["step_00002.parquet", "step_00004.parquet"]
    path = tmp_path / "traces" / "step_00004.parquet"
    rows = list(read_traces(path))
    assert [(r.source, r.update, r.sequence) for r in rows] == [
        (source, update, sequence) for source, update in (("old", 0), ("new", 1)) for sequence in (0, 2, 5)
    ]
    assert (rows[0].expert_ids_TLK != rows[3].expert_ids_TLK).any()
    assert rows[1].token_ids_T.tolist() == rollouts.tokens_BS[2][rollouts.attention_BS[2]].tolist()
    assert json.loads(json.dumps(read_header(path).versions))["torch"].startswith(torch.__version__.split("+")[0])
