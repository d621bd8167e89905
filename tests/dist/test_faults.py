"""The measure of parity catches each planted fault, in a layout that it concerns; without one, all agrees."""

import pytest
from faults import FAULTS, run_with_fault
from test_layouts import reference_of
from tiny import tiny_config

from megnorm.plan.layout import make_layout
from megnorm.testing.compare import judge
from megnorm.testing.parity import PHASES
from megnorm.testing.ranks import RankFailed, run_ranks

MIXED = {"scheme": "hybrid_star", "overrides": {
    "1": {"attention": {"ctx_norm": "default"}, "ffn": {"mid_norm": "default", "out_norm": "default"}},
    "2": {"attention": {"q_norm": {"scope": "all_heads"}, "k_norm": {"scope": "all_heads"}}}}}
TP = (2, {"parallel__tp": 2, "model__bias": True})
TP_DP = (4, {"parallel__tp": 2})
SP = (2, {"parallel__tp": 2, "parallel__sp": True})
KV = (2, {"parallel__tp": 2, "model__kv_heads": 1})
PP = (2, {"parallel__pp": 2})
PP_ZERO0 = (2, {"parallel__pp": 2, "parallel__zero_stage": 0})
DP = (2, {})
CP = (2, {"parallel__cp": 2})
DOCUMENTS = {"data__mask_documents": True, "data__reset_positions": True}
PP_DOCUMENTS = (2, {"parallel__pp": 2, **DOCUMENTS})
CP_DOCUMENTS = (2, {"parallel__cp": 2, **DOCUMENTS})
LAYOUT_OF = {
    "gain_not_summed": TP, "gain_summed_twice": TP, "gain_averaged": SP, "final_norm_forgotten_under_sp": SP,
    "key_copies_not_summed": KV, "statistic_of_one_rank": TP, "statistic_without_backward_sum": TP,
    "input_gradient_not_summed": TP, "residual_after_enter": TP, "bias_on_every_rank": TP,
    "world_group_in_collectives": TP_DP, "layer_number_local_to_the_stage": PP,
    "initial_depth_local_to_the_stage": PP, "same_draw_for_all_shards": TP, "mean_over_own_tokens": DP,
    "shards_not_marked_for_the_norm": TP_DP, "replicas_counted_in_the_norm": TP_DP, "tied_copy_counted_twice": PP_ZERO0,
    "tied_gradient_not_summed": PP, "gradients_summed_over_replicas": DP, "decay_of_everything": DP,
    "positions_from_zero_on_each_context_rank": CP, "one_replica_drifts": TP,
    "later_stages_ignore_documents": PP_DOCUMENTS,
    "context_ranks_take_documents_for_their_own_part": CP_DOCUMENTS,
}
LATE = {"decay_of_everything"}  # the first step, from equal weights, shows all others


def test_every_fault_has_a_layout():
    assert set(LAYOUT_OF) == set(FAULTS) and len(FAULTS) >= 15


@pytest.mark.parametrize("name", LAYOUT_OF)
def test_fault_is_caught(name):
    world, changes = LAYOUT_OF[name]
    config = tiny_config(MIXED, **changes)
    try:
        ranks = run_ranks(run_with_fault, world, name, config, PHASES if name in LATE else PHASES[:1])
    except RankFailed as failure:
        pytest.fail(f"the fault broke the run, which proves nothing:\n{failure}")
    assert judge(reference_of(config), ranks, make_layout(config, world)).faults


@pytest.mark.parametrize("world, changes", [TP, SP, KV, PP_ZERO0, CP], ids=["tp", "sp", "kv", "pp", "cp"])
def test_without_a_fault_the_same_layouts_agree(world, changes):
    config = tiny_config(MIXED, **changes)
    verdict = judge(reference_of(config), run_ranks(run_with_fault, world, "", config, PHASES), make_layout(config, world))
    assert verdict.agrees, "\n".join(verdict.faults)
