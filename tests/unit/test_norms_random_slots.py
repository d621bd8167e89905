"""Random slots in the first and the last layer: the printed equations are what the module computes."""

from decoders import model_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_norms_equations import difference

FACTORS = st.sampled_from([1.0, 0.5, -1.5, {"value": 0.7, "learned": "scalar"},
                           {"value": 0.7, "learned": "vector"}, {"value": 2.0, "ramp_steps": 3000},
                           {"learned": "vector", "ramp_steps": 2000}])


def norms(**more):
    """A slot's norm; two values of eps, so that norms of a kind have different names."""
    options = {"kind": st.sampled_from(["rms", "layer", "l2", "dyt"]), "bias": st.booleans(),
               "eps": st.sampled_from([1e-5, 1e-2]), "zero_centred": st.booleans(), **more}
    return st.sampled_from(["none", "default"]) | st.fixed_dictionaries({}, optional=options)


SCALE = st.sampled_from([1.0, 0.5])
HEADS = {"scale": SCALE, "scope": st.sampled_from(["head", "all_heads"]),
         "gain": st.sampled_from(["vector", "none"])}
TURNED = {**HEADS, "rope": st.sampled_from(["before", "after"])}
SHARED = {"in_norm": norms(scale=SCALE), "out_norm": norms(scale=SCALE), "post_norm": norms(),
          "residual_scale": FACTORS, "branch_scale": FACTORS,
          "residual_from": st.sampled_from(["raw", "normed"])}
ATTENTION = {**SHARED, "q_norm": norms(**TURNED), "k_norm": norms(**TURNED), "v_norm": norms(**HEADS),
             "ctx_norm": norms(**HEADS), "head_scale": st.sampled_from(["none", "before", "after"]),
             "gate": st.sampled_from(["none", "head", "element"])}
LAYER = st.fixed_dictionaries({
    "attention": st.fixed_dictionaries({}, optional=ATTENTION),
    "ffn": st.fixed_dictionaries({}, optional={**SHARED, "mid_norm": norms(scale=SCALE)})})


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["pre", "post", "hybrid_star", "residual", "custom"]), LAYER, LAYER)
def test_equations_of_random_slots(scheme, first, last):
    model = model_config(layers=3, norm={"scheme": scheme, "overrides": {"0": first, "-1": last}})
    assert difference(model) < 2e-5
