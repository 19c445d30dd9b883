#!/bin/sh
# Every study behind experiments/results, each with one command or a few; a second call goes on where the first ended.
# Seeds 0-4 are reported, 0-9 of methods, 10-29 of the replications. The learning rate of most studies, 1e-3, was found on seed
# 100; those of methods, replication and families by study tuning, on seeds 100 and 101. About five hours of one core.
set -e
RESULTS=${RESULTS:-results}
study() { name=$1; shift; python experiments/train.py study="$name" launch.results_dir="$RESULTS" "$@"; }

study drift_vs_lr
study flip_regimes
study many_experts
study drift_vs_depth
study ratio_vs_length
study drift_per_update
study clipping
study clipping arm=gspo arm.policy_loss.clip_low=3e-3 arm.policy_loss.clip_high=4e-3
study clipping arm=gspo arm.policy_loss.clip_low=3e-2 arm.policy_loss.clip_high=4e-2
study clipping arm=gspo arm.policy_loss.clip_low=0.128 arm.policy_loss.clip_high=0.0486   # by calibrate_clip.py
study clipping arm=gspo arm.policy_loss.clip_low=0.194 arm.policy_loss.clip_high=0.0492
study engine_likelihoods
study controls
study controls arm=grpo_shuffled_replay optim.trains=all
study stability_frontier
study stability_frontier optim.lr=2e-3
study dense_twin
study staleness
study tuning
study methods
study replication
study families
study replay_modes
study routers
study routers arm=grpo_r3 router=native,predictive
study router_training
study router_training optim.trains=all optim.router_lr=0.1
study router_training optim.trains=all optim.balance_loss=0.01
study router_training optim.trains=all optim.router_kl=1.0
study engine_mismatch
study side_by_side seed=0,1,2,3,4
study replication_stress
study replication_dense
