"""The summary counts what went wrong and averages only what finished."""

import io
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from synthetic import make_study

from moe_rl import contrasts, printing, store, summary
from moe_rl.store import read_study


def write_run(results, arm, seed, rewards, state="finished", evaluated=True, knobs=None, cpu_s=7.0):
    with store.open_run(store.run_folder(results, "s", arm, knobs or {}, seed), {"arm": arm, "seed": seed}) as writer:
        writer.describe(num_layers=0, top_k=0, num_experts=0, updates_per_step=2, cpu_s=cpu_s)
        for step, reward in enumerate(rewards, start=1):
            row = {"step": step, "reward": 0.01 * step}
            writer.append("steps", {**row, "eval_reward": reward} if evaluated and reward is not None else row)
            for update in (1, 2):
                writer.append("updates", {"step": step, "update": update, "clip_frac": 0.1 * update})
        writer.status(state, step=len(rewards))


def row_of(study, arm):
    table = summary.summary_table(study)
    return table[table["arm"] == arm].iloc[0]


def test_final_reward_is_the_mean_over_the_last_tenth_of_the_steps(tmp_path):
    for seed, end in enumerate((0.5, 0.6, 0.8)):
        write_run(tmp_path, "gspo", seed, [0.9] * 18 + [end - 0.1, end + 0.1])
    row = row_of(read_study(tmp_path / "s"), "gspo")
    low, high = scipy_stats.t.interval(0.95, 2, np.mean([0.5, 0.6, 0.8]), scipy_stats.sem([0.5, 0.6, 0.8]))
    assert row["measure"] == "eval_reward"
    assert (row["final_reward"], row["final_low"], row["final_high"]) == pytest.approx((1.9 / 3, low, high))
    assert row["clip_frac"] == pytest.approx(0.15)
    assert row["cpu_s"] == 7


def test_without_evaluations_the_training_reward_counts(tmp_path):
    write_run(tmp_path, "gspo", 0, [0.0] * 10, evaluated=False)
    row = row_of(read_study(tmp_path / "s"), "gspo")
    assert (row["measure"], row["final_reward"]) == ("reward", pytest.approx(0.1))
    assert math.isnan(row["final_low"])


def test_where_the_last_steps_were_not_evaluated_the_last_evaluation_counts(tmp_path):
    write_run(tmp_path, "gspo", 0, [0.1, None, 0.4, None, None])
    assert row_of(read_study(tmp_path / "s"), "gspo")["final_reward"] == pytest.approx(0.4)


def test_collapsed_is_below_half_of_the_runs_own_best(tmp_path):
    write_run(tmp_path, "gspo", 0, [0.2, 0.8, 0.39])
    write_run(tmp_path, "gspo", 1, [0.2, 0.8, 0.41])
    write_run(tmp_path, "grpo", 0, [0.2, 0.8, 0.1], state="diverged")
    study = read_study(tmp_path / "s")
    assert row_of(study, "gspo")["collapsed"] == 1
    assert row_of(study, "grpo")[["collapsed", "diverged"]].to_list() == [0, 1]


def test_runs_that_did_not_finish_are_counted_named_and_in_no_mean(tmp_path):
    study = read_study(
        make_study(
            tmp_path, missing=[("gspo", 1)], diverged=[("grpo", 2)], failed=[("grpo_routing_replay", 0)], steps=4
        )
    )
    table = summary.summary_table(study).set_index("arm")
    counts = table[["seeds", "finished", "diverged", "failed", "missing"]]
    assert counts.loc["grpo"].to_list() == [3, 2, 1, 0, 0]
    assert counts.loc["grpo_routing_replay"].to_list() == [3, 2, 0, 1, 0]
    assert counts.loc["gspo"].to_list() == [2, 2, 0, 0, 1]
    runs = summary.run_measures(study)
    finished = runs[(runs["arm"] == "grpo") & (runs["state"] == "finished")]["final_reward"]
    assert table.loc["grpo", "final_reward"] == pytest.approx(finished.mean())
    assert runs[runs["state"] != "finished"]["final_reward"].isna().all()
    assert summary.incidents(study) == [
        "grpo seed 2 diverged at step 2",
        "grpo_routing_replay seed 0 failed at step 2",
        "gspo seed 1 is missing",
    ]


def test_an_arm_without_a_finished_run_has_no_number(tmp_path):
    study = read_study(make_study(tmp_path, diverged=[("grpo", 0)], seeds=[0], steps=3))
    row = row_of(study, "grpo")
    assert row["finished"] == 0
    assert math.isnan(row["final_reward"])


def test_below_five_seeds_the_print_claims_nothing(tmp_path):
    study = read_study(make_study(tmp_path, steps=3, dense=True, diverged=[("grpo", 2)]))
    out = io.StringIO()
    printing.print_summary(study, out)
    text = out.getvalue()
    assert text.count("too few seeds for a significance claim") == 3
    assert "(n = 3)" in text
    assert "(n = 2)" in text
    assert "p =" not in text
    assert "grpo seed 2 diverged at step 2" in text


def test_the_print_tells_settings_by_what_they_vary(tmp_path):
    for lr in (0.1, 0.2):
        for arm in ("grpo", "gspo"):
            write_run(tmp_path, arm, 0, [0.5], knobs={"optim.lr": lr, "steps": 1})
    out = io.StringIO()
    printing.print_summary(read_study(tmp_path / "s"), out)
    lines = out.getvalue().splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [[a, f"lr={lr}"] for lr in (0.1, 0.2) for a in ("grpo", "gspo")]
    assert lines[5].startswith("grpo minus gspo, lr=0.1: 0 ")
    assert "steps" not in out.getvalue().replace("steps.", "")


def test_from_five_seeds_on_pairs_are_compared_with_holm(tmp_path):
    arms = {"grpo": (0.1, 0.2, 0.3, 0.4, 0.5), "gspo": (0.5, 0.61, 0.7, 0.8, 0.9), "sapo": (0.12, 0.2, 0.28, 0.41, 0.5)}
    for arm, values in arms.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, arm, seed, [value])
    pairs = contrasts.comparison_table(read_study(tmp_path / "s")).set_index(["first", "second"])
    clear, null = pairs.loc[("grpo", "gspo")], pairs.loc[("grpo", "sapo")]
    assert clear["claim"] == "differ"
    assert null["claim"] == "no difference shown"
    raw = {pair: scipy_stats.ttest_rel(arms[pair[0]], arms[pair[1]]).pvalue for pair in pairs.index}
    assert clear["p"] == pytest.approx(3 * min(raw.values()))
    assert null["p"] == pytest.approx(max(raw.values()))
    assert clear["sign_flip_p"] == pytest.approx(3 * 2 / 2**5)  # all five of one sign: the least that 5 seeds can give


def test_arms_at_settings_of_their_own_are_compared_if_each_has_one(tmp_path):
    for seed in range(5):
        write_run(tmp_path, "grpo", seed, [0.3 + 0.01 * seed], knobs={"optim.lr": 1e-4})
        write_run(tmp_path, "gspo", seed, [0.5 + 0.02 * seed], knobs={"optim.lr": 2e-4})
    (row,) = contrasts.comparison_table(read_study(tmp_path / "s")).to_dict("records")
    assert (row["knobs"], row["other_knobs"]) == ("optim.lr=0.0001", "optim.lr=0.0002")
    assert (row["n"], row["difference"]) == (5, pytest.approx(-0.22))
    write_run(tmp_path, "grpo", 0, [0.4], knobs={"optim.lr": 3e-4})
    assert contrasts.comparison_table(read_study(tmp_path / "s")).empty


def test_settings_that_differ_in_one_choice_are_compared_with_the_usual_one(tmp_path):
    for router, base in (("binned", 0.4), ("native", 0.3), ("noisy", 0.2)):
        for seed in range(5):
            write_run(tmp_path, "grpo", seed, [base + 0.01 * seed * (router == "noisy")], knobs={"router": router})
    study = read_study(tmp_path / "s")
    assert contrasts.comparison_table(study).empty
    rows = contrasts.setting_table(study).to_dict("records")
    assert [contrasts.pair_label(study, row) for row in rows] == [
        "grpo: router=binned minus router=native",
        "grpo: router=noisy minus router=native",
    ]
    assert [row["difference"] for row in rows] == [pytest.approx(0.1), pytest.approx(-0.08)]
    differences = [0.2 + 0.01 * seed - 0.3 for seed in range(5)]
    assert rows[1]["p"] == pytest.approx(scipy_stats.ttest_1samp(differences, 0).pvalue)  # the other's p is 0
    assert "grpo: router=noisy minus router=native: -0.08 " in printed(study)


def test_a_number_or_another_model_is_no_choice_and_a_knob_that_is_not_given_is_one(tmp_path):
    for knobs in (
        {},
        {"optim.router_kl": 1.0},
        {"optim.lr": 0.1},
        {"optim.lr": 0.2},
        {"optim.lr": 0.1, "router": "noisy"},
    ):
        write_run(tmp_path, "grpo", 0, [0.5], knobs=knobs)
    for model in ("tiny_mixtral", "tiny_olmoe"):
        write_run(tmp_path, "gspo", 0, [0.5], knobs={"model": model})
    rows = contrasts.setting_table(read_study(tmp_path / "s"))
    pairs = set(zip(rows["knobs"], rows["other_knobs"], strict=True))
    assert pairs == {
        ("optim.router_kl=1.0", "default"),
        ("optim.lr=0.1", "default"),
        ("optim.lr=0.2", "default"),
        ("optim.lr=0.1,router=noisy", "optim.lr=0.1"),
    }


def printed(study):
    out = io.StringIO()
    printing.print_summary(study, out)
    return out.getvalue()


def test_from_ten_runs_on_the_interquartile_mean_stands_beside_the_mean(tmp_path):
    """Of 0, 1 .. 8, 99 hundredths the middle six are 2 to 7: their mean is 4.5, whatever the largest is."""
    for seed, value in enumerate((0.05, 0.02, 0.99, 0.0, 0.07, 0.03, 0.01, 0.06, 0.04, 0.08)):
        write_run(tmp_path, "gspo", seed, [value])
        if seed < 9:
            write_run(tmp_path, "grpo", seed, [value])
    write_run(tmp_path, "grpo", 9, [0.5], state="diverged")
    table = summary.summary_table(read_study(tmp_path / "s")).set_index("arm")
    names = ["iqm", "iqm_low", "iqm_high"]
    iqm, low, high = table.loc["gspo", names]
    assert iqm == pytest.approx(0.045)
    assert 0.02 < low < iqm < high < table.loc["gspo", "final_high"]
    assert table.loc["grpo", names].isna().all()
    again = read_study(tmp_path / "s")
    assert summary.summary_table(again).set_index("arm").loc["gspo", names].to_list() == [iqm, low, high]
    head, nine, ten = printing.summary_rows(table.reset_index())
    place = head.index("interquartile mean [95 %]")
    assert nine[place] == ""
    assert ten[place] == f"0.045 [{low:.3g}, {high:.3g}] (n = 10)"
    assert "interquartile mean [95 %]" not in printing.summary_rows(table.loc[["grpo"]].reset_index())[0]


def test_knob_settings_are_ordered_by_number_and_named_shortly(tmp_path):
    for lr in (1e-3, 2e-5, 4e-4):
        write_run(tmp_path, "gspo", 0, [0.5], knobs={"optim.lr": lr})
    knobs = summary.knobs_of(read_study(tmp_path / "s"))
    assert knobs == ["optim.lr=2e-05", "optim.lr=0.0004", "optim.lr=0.001"]
    assert [summary.knob_label(one, knobs) for one in knobs] == ["lr=2e-05", "lr=0.0004", "lr=0.001"]
    assert summary.knob_label("a.x=1,b.x=2", ["a.x=1,b.x=2", "default"]) == "a.x=1, b.x=2"
    assert summary.knob_label("optim.lr=1", ["optim.lr=1"]) == ""


def test_a_label_leaves_out_what_all_settings_share():
    everywhere = ["model.layers=4,optim.lr=0.1,task=sort", "model.layers=8,optim.lr=0.1,task=sort"]
    assert [summary.knob_label(one, everywhere) for one in everywhere] == ["layers=4", "layers=8"]
    ends_alike = ["a.x=1,b.x=2", "a.x=3,b.x=2"]  # only one of the two keys that end alike is left
    assert [summary.knob_label(one, ends_alike) for one in ends_alike] == ["x=1", "x=3"]


def test_a_setting_is_read_from_its_folders_name():
    assert summary.knob_pairs("optim.lr=1e-05,updates=4") == {"optim.lr": "1e-05", "updates": "4"}
    assert summary.knob_pairs("default") == {}
    assert [summary.is_number(text) for text in ("1e-05", "4", "binned", "")] == [True, True, False, False]
