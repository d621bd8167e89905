"""Every backend of the norms: values and gradients against fp64, contiguous and strided; what is refused."""

import os
import shutil
import sys

import pytest
import torch
from decoders import decoder, model_config, relative

from megnorm.config import ConfigError
from megnorm.config.placement import HeadNorm, Norm
from megnorm.model import kernels
from megnorm.model.norm import LocalNorm, check_device, heads_norm, kernels_used
from megnorm.norms import backends
from megnorm.parallel.tensor import Alone

LIMITS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}
# What NVIDIA's apex offers under these names, in plain torch: it can't be built without CUDA.
APEX = '''
import torch.nn.functional as F

def fused_rms_norm(x, shape, eps=1e-6, memory_efficient=False):
    return F.rms_norm(x.contiguous(), shape, None, eps)

def fused_rms_norm_affine(x, weight, shape, eps=1e-6, memory_efficient=False):
    assert x.dtype == weight.dtype
    return F.rms_norm(x.contiguous(), shape, weight, eps)

def fused_layer_norm(x, shape, eps=1e-6, memory_efficient=False):
    return F.layer_norm(x.contiguous(), shape, None, None, eps)

def fused_layer_norm_affine(x, weight, bias, shape, eps=1e-6, memory_efficient=False):
    assert x.dtype == weight.dtype == bias.dtype
    return F.layer_norm(x.contiguous(), shape, weight, bias, eps)
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package called apex in front of what is installed; its files by name."""
    def put(files):
        for name, text in files.items():
            (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "apex" / name).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
    kernels.apex.cache_clear()
    yield put
    kernels.apex.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.fixture
def nvidias(install):
    install({"__init__.py": "", "normalization/__init__.py": "", "normalization/fused_layer_norm.py": APEX})


def results(norm, module, x, direction):
    """Value and gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], direction)]


def reference(norm, gain, bias, x):
    """The equations of placement.Norm in fp64."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    size = x.square().sum(-1, keepdim=True) if norm.kind == "l2" else x.square().mean(-1, keepdim=True)
    y = x / (size + norm.eps).sqrt() * (gain + norm.zero_centred)
    return norm.scale * (y if bias is None else y + bias)


NORMS = [Norm(kind=kind, **more) for kind in ("rms", "layer", "l2") for more in (
    {}, {"bias": True}, {"rounding": "cast_then_gain"}, {"zero_centred": True, "scale": 0.7, "bias": True})]


def check(backend, norm, dtype, width=24, layouts=3):
    module = LocalNorm("n", norm, width, tp=Alone(), backend=backend).to(dtype)
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(1 + 0.3 * torch.randn(width, generator=stream))
    wide = torch.randn(3, 5, 2 * width, generator=stream).to(dtype)
    for x in (wide[..., :width].contiguous(), wide[..., ::2], wide.transpose(0, 1)[..., width:])[:layouts]:
        direction = torch.randn(x.shape, generator=stream)
        got = results(norm, module, x, direction.to(dtype))
        leaves = [leaf.detach().double().requires_grad_() for leaf in (x, *module.parameters())]
        y = reference(norm, leaves[1], leaves[2] if norm.bias else None, leaves[0])
        right = [y, *torch.autograd.grad(y, leaves, direction.to(dtype).double())]
        for one, other in zip(got, right, strict=True):
            assert one.dtype == dtype
            assert relative(one.double(), other) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_backend_against_fp64(backend, norm, dtype):
    check(backend, norm, dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_apex_against_fp64(nvidias, norm, dtype):
    backends.check_backend("apex")
    check("apex", norm, dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_what_is_compiled_against_fp64(monkeypatch, norm, dtype):
    """The plain code that torch.compile gets, as it stands: each compilation would take seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    kernels.compiled.cache_clear()
    check("compile", norm, dtype)
    kernels.compiled.cache_clear()


@pytest.mark.skipif(not backends.cpp_compiler(), reason="no C++ compiler")
@pytest.mark.skipif(os.environ.get("TORCHDYNAMO_DISABLE") == "1", reason="torch.compile is switched off")
def test_compiled_against_fp64():
    check("compile", Norm(), torch.float32, layouts=1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_gain_per_head_in_bf16_is_rounded_once():
    norm = HeadNorm(gain="per_head")
    module = heads_norm("q", norm, 3, 8, Alone()).bfloat16()
    stream = torch.Generator().manual_seed(2)
    with torch.no_grad():
        module.gain.copy_(1 + 0.3 * torch.randn(3, 8, generator=stream))
    x = torch.randn(64, 24, generator=stream).bfloat16()
    right = reference(norm, module.gain.double(), None, x.double().unflatten(-1, (3, 8))).flatten(-2)
    assert (module(x) != right.bfloat16()).sum() < 5


def test_what_computes_the_norms_is_listed():
    module = decoder(model_config(layers=2, norm={"scheme": "normformer", "backend": "torch"}))
    assert kernels_used(module) == ["7 x layer over 32: torch", "2 x layer over 48: torch"]
    module = decoder(model_config(layers=1, norm={"scheme": "pre", "overrides": {"0": {"ffn": {
        "in_norm": {"kind": "dyt"}, "out_norm": {"kind": "l2"}}}}}))
    assert sorted(kernels_used(module)) == ["1 x dyt over 32: torch", "1 x l2 over 32: auto", "2 x rms over 32: auto"]


def test_compile_that_is_switched_off_is_refused(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    kernels.compiled.cache_clear()
    with pytest.raises(ConfigError, match="model.norm.backend=compile, but TORCHDYNAMO_DISABLE=1 switches"):
        kernels.kernel_for("rms", "compile")


def test_without_apex(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="model.norm.backend=apex: NVIDIA's apex is not installed; build it from"):
        backends.check_backend("apex")


def test_the_other_apex(install):
    install({"__init__.py": "raise RuntimeError('it must not be imported')"})
    with pytest.raises(ConfigError, match="(?s)/apex.* is not NVIDIA's.*PyPI, another program: pip uninstall apex"):
        backends.check_backend("apex")


def test_apex_on_a_cpu():
    with pytest.raises(ConfigError, match="CUDA devices only, and this run is on cpu; take auto, torch or compile"):
        check_device("apex", torch.device("cpu"))
    check_device("apex", torch.device("cuda"))
    check_device("auto", torch.device("cpu"))


def test_compile_without_a_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        backends.check_backend("compile")
    backends.check_backend("auto")
