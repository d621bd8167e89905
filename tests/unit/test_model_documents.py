"""Rows of several documents: no core lets one see another, positions count from where they say."""

import numpy as np
import pytest
import torch
from decoders import decoder, model_config, relative

from megnorm.model import core
from megnorm.model.block_causal import BLOCK, LONGEST
from megnorm.model.documents import Documents

# First place of each document of two rows of 12 tokens.
STARTS = ((0, 5, 6), (0, 7))
LENGTH = 12


def ids_of(starts, length):
    ids = torch.zeros(len(starts), length, dtype=torch.int32)
    for row, places in enumerate(starts):
        for place in places[1:]:
            ids[row, place:] += 1
    return ids


def rows_of(starts=STARTS, length=LENGTH, reset=True):
    """positions, ids."""
    ids = ids_of(starts, length)
    places = torch.arange(length).expand(len(starts), -1)
    return (places - Documents(places, ids).begins if reset else places), ids


def test_where_documents_begin_and_end():
    documents = Documents(*rows_of(((0, 2, 3), (0,)), 5))
    assert documents.begins.tolist() == [[0, 0, 2, 3, 3], [0, 0, 0, 0, 0]]
    assert documents.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert documents.spans == [[(0, 2), (2, 3), (3, 5)], [(0, 5)]]


def noise(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def masked_attention(q, k, v, ids, scale, cap):
    """The equation, with the mask as a matrix."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    seen = (ids[:, :, None] == ids[:, None, :]).tril()
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


def flex(q, k, v, documents):
    """What runs on CUDA, uncompiled."""
    return core._flex(q, k, v, 0.4, 1.5, documents)


CORES = {
    "blocks of queries": (core.make_core(0.4, None), None, 2 * BLOCK + 5),
    "each document alone": (core.make_core(0.4, None), None, LONGEST + 9),
    "soft-cap": (core.make_core(0.4, 1.5), 1.5, core.ROWS + 70),
    "flex_attention": (flex, 1.5, 140),
}


@pytest.mark.parametrize("name", CORES)
def test_core(name, monkeypatch):
    """Output and gradients, documents of one token, at the edges of blocks and over several."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    core._compiled.cache_clear()
    function, cap, length = CORES[name]
    starts = ((0, 1, BLOCK, length - 3), (0, BLOCK - 1, BLOCK + 1, 2 * BLOCK), (0,))
    positions, ids = rows_of(starts, length)
    inputs = [noise(3, length, n, 16, seed=n).transpose(1, 2).requires_grad_(name != "flex_attention")
              for n in (4, 2, 2)]
    own, right = function(*inputs, Documents(positions, ids)), masked_attention(*inputs, ids, 0.4, cap)
    core._compiled.cache_clear()
    assert relative(own, right) < 1e-13
    if name == "flex_attention":  # its backward pass is compiled or none
        return
    grad = noise(*own.shape, seed=9)
    for a, b in zip(torch.autograd.grad(own, inputs, grad), torch.autograd.grad(right, inputs, grad), strict=True):
        assert relative(a, b) < 1e-13


@pytest.mark.parametrize("core_of", [core.make_core(0.4, None), core.make_core(0.4, 1.5)])
def test_one_document_is_the_causal_core_to_the_bit(core_of):
    q, k, v = (noise(2, n, BLOCK + 9, 8, seed=n, dtype=torch.float32) for n in (4, 2, 2))
    assert torch.equal(core_of(q, k, v, Documents(*rows_of(((0,), (0,)), BLOCK + 9))), core_of(q, k, v))


@pytest.mark.parametrize("name", CORES)
def test_padding_behind_a_row_changes_no_token(name, monkeypatch):
    """A document of its own, -1: tokens and their gradients are those of a row without."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    core._compiled.cache_clear()
    function, cap, length = CORES[name]
    positions, ids = rows_of(((0,), (0, BLOCK - 1), (0,)), length)
    padded, real = ids.clone(), torch.tensor([length - 3, BLOCK + 1, 1])
    padded[torch.arange(length) >= real[:, None]] = -1
    inputs = [noise(3, length, n, 16, seed=n).transpose(1, 2).requires_grad_(name != "flex_attention")
              for n in (4, 2, 2)]
    own, right = function(*inputs, Documents(positions, padded)), masked_attention(*inputs, ids, 0.4, cap)
    core._compiled.cache_clear()
    seen = (padded >= 0)[:, None, :, None]
    assert relative(own * seen, right * seen) < 1e-13
    if name == "flex_attention":
        return
    grad = noise(*own.shape, seed=9) * seen
    for a, b in zip(torch.autograd.grad(own, inputs, grad), torch.autograd.grad(right, inputs, grad), strict=True):
        assert relative(a, b) < 1e-13


MODELS = {
    "pre": {"norm": "pre"},
    "post": {"norm": "post"},
    "hybrid_star": {"norm": "hybrid_star"},
    "two streams": {"norm": "residual"},
    "experts": {"norm": "pre", "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 16}},
    "soft-cap": {"norm": {"scheme": "peri", "attention_softcap": 2.0}},
    "norm after rotation, over all heads, gate": {"norm": {"scheme": "pre", "overrides": {":": {"attention": {
        "q_norm": {"rope": "after"}, "k_norm": {"scope": "all_heads"}, "ctx_norm": "default", "gate": "head"}}}}},
}


def tokens(seed=0):
    return torch.randint(29, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def changed_first_document():
    ids = tokens()
    ids[:, :5] = (ids[:, :5] + 1) % 29
    return ids


@pytest.mark.parametrize(("name", "recompute"), [*((name, "none") for name in MODELS), ("hybrid_star", "full"),
                                                 ("hybrid_star", "selective")])
def test_an_earlier_document_does_not_reach_a_later_one(name, recompute):
    """Logits and losses of the later ones, to the bit; without the mask the same change is seen everywhere."""
    module = decoder(model_config(**MODELS[name]), dtype=torch.float32, recompute=recompute)
    positions, ids = rows_of()
    later = ids > 0
    before, after = (module((x, positions, ids)) for x in (tokens(), changed_first_document()))
    assert torch.equal(before[later], after[later])
    assert not torch.isclose(before[~later], after[~later]).all(-1).all()
    losses = [module((x, positions, ids), tokens(1), later / later.sum()) for x in (tokens(), changed_first_document())]
    assert torch.equal(*losses)
    gradients = [torch.autograd.grad(loss, module.parameters()) for loss in losses]
    assert all(torch.isfinite(g).all() for g in gradients[0])
    ignored = [module((x, positions, torch.zeros_like(ids)))[later] for x in (tokens(), changed_first_document())]
    assert (ignored[0] != ignored[1]).any(-1).all()


@pytest.mark.parametrize("name", MODELS)
def test_each_document_is_as_if_it_were_alone(name):
    module = decoder(model_config(**MODELS[name]))
    together = module((tokens(), *rows_of()))
    for row, starts in enumerate(STARTS):
        for first, end in zip(starts, (*starts[1:], LENGTH), strict=True):
            alone = module(tokens()[row:row + 1, first:end])
            assert relative(together[row, first:end], alone[0]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_document_with_positions_of_the_row_is_the_plain_model_to_the_bit(dtype):
    module = decoder(model_config(), dtype=dtype)
    assert torch.equal(module((tokens(), *rows_of(((0,), (0,))))), module(tokens()))


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_no_token_of_the_model(name):
    module = decoder(model_config(**MODELS[name]))
    positions, ids = rows_of(((0,), (0,)))
    ids[0, 9:], ids[1, 5:] = -1, -1
    found, plain = module((tokens(), positions, ids)), module(tokens())
    assert relative(found[ids >= 0], plain[ids >= 0]) < 1e-12


def test_positions_alone_are_reset():
    """Without a mask, rotation by the position in the document: distances across an edge change, others don't."""
    module, one = decoder(model_config()), torch.zeros(2, LENGTH, dtype=torch.int32)
    positions, ids = rows_of()
    row, reset = module((tokens(), *rows_of(reset=False)[:1], one)), module((tokens(), positions, one))
    assert torch.equal(row[ids == 0], reset[ids == 0])
    assert np.all((row - reset).detach().abs().amax(-1).numpy()[(ids > 0).numpy()] > 1e-6)


def test_with_a_mask_only_distances_count():
    """Positions of the row give the same as positions of the document."""
    module = decoder(model_config())
    assert relative(module((tokens(), *rows_of(reset=False))), module((tokens(), *rows_of()))) < 1e-12
