"""A small tensor- and pipeline-parallel model under real DeepSpeed engines, for the checkpoint tests.

Its values don't depend on the layout. One parameter has 7 elements: no number of replicas divides it.
"""

import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from megnorm.checkpoint import storage
from megnorm.checkpoint.load import load
from megnorm.checkpoint.save import save
from megnorm.engine.mpu import Mpu
from megnorm.engine.start import quiet, start
from megnorm.engine.state import read_state
from megnorm.parallel.groups import make_groups
from megnorm.parallel.sharding import Constant, sharding_of
from megnorm.plan.layout import Layout

VOCAB, HIDDEN, FFN, SEQUENCE, BATCH = 16, 8, 16, 4, 4


def initial(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.3


def parameter(tp, name, shape, role="matrix", dim=None):
    p = tp.parameter(name, shape, dim=dim, role=role, init=Constant(0.0))
    p.data.copy_(initial(name, shape)[p.sharding.slices()])
    return p


class Embedding(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.tp = tp
        self.weight = parameter(tp, "embedding.weight", (VOCAB, HIDDEN), "embedding", 0)

    def forward(self, tokens):
        local = tokens - self.tp.rank * self.weight.shape[0]
        here = (local >= 0) & (local < self.weight.shape[0])
        x = F.embedding(local.where(here, torch.zeros_like(local)), self.weight)
        return self.tp.leave(x * here.unsqueeze(-1).to(x.dtype))


class Block(nn.Module):
    def __init__(self, tp, layer):
        super().__init__()
        self.tp, name = tp, f"layers.{layer}"
        self.gain = parameter(tp, f"{name}.gain", (HIDDEN,), "norm")
        self.odd = parameter(tp, f"{name}.odd", (7,), "bias")
        self.up = parameter(tp, f"{name}.up", (FFN, HIDDEN), dim=0)
        self.down = parameter(tp, f"{name}.down", (HIDDEN, FFN), dim=1)

    def forward(self, x):
        h = self.tp.enter(F.layer_norm(x, (HIDDEN,)) * (1 + self.gain))
        return x + self.tp.leave(F.gelu(h @ self.up.T) @ self.down.T) + 0.1 * self.odd.mean()


class Head(nn.Module):
    """The loss needs no vocabulary-parallel code: columns of other ranks are another sum to leave with."""

    def __init__(self, tp):
        super().__init__()
        self.tp = tp
        self.weight = parameter(tp, "head.weight", (HIDDEN, HIDDEN), dim=1)

    def forward(self, x):
        n = self.weight.shape[1]
        return self.tp.leave(self.tp.enter(x)[..., self.tp.rank * n:(self.tp.rank + 1) * n] @ self.weight.T)


def tied_head(embedding, x):
    return x @ embedding.tp.leave(embedding.weight.sum(0)).diag()


def one_after_another(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def loss_of(x, target):
    return (x.float() - target).square().mean()


class Plain(nn.Module):
    def __init__(self, layers, tied):
        super().__init__()
        self.tied = tied
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)

    def forward(self, tokens, target):
        x = tokens
        for layer in self.children():
            x = layer(x)
        return loss_of(tied_head(self.get_submodule("0"), x) if self.tied else x, target)


def build_module(groups, layers, tied, bounds):
    kinds = [(Embedding,), *((Block, n) for n in range(layers)), *([] if tied else [(Head,)])]
    if groups.layout.pp == 1:
        return Plain([kind(groups.tp, *rest) for kind, *rest in kinds], tied)
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from megnorm.engine.pipeline import Stage

    specs = [LayerSpec(kind, groups.tp, *rest) for kind, *rest in kinds]
    if tied:
        specs[0] = TiedLayerSpec("embedding", Embedding, groups.tp)
        specs.append(TiedLayerSpec("embedding", Embedding, groups.tp, forward_fn=tied_head))
    count = len(specs)
    even = [count * k // groups.layout.pp for k in range(groups.layout.pp + 1)]
    return Stage(specs, bounds or even, one_after_another, groups.layout, loss_of)


def build(layout=(1, 1, 1), *, zero=0, dtype="fp32", optimizer="adamw", layers=2, tied=False, bounds=None,
          persist=False, betas=(0.9, 0.95)):
    """A DeepSpeed engine and its groups; layout: (pp, dp, tp)."""
    import deepspeed

    start(torch.device("cpu"), 60)
    deepspeed.utils.groups.mpu = None  # left by an engine before this one
    torch.manual_seed(0)
    groups = make_groups(Layout(*layout), torch.device("cpu"))
    module = build_module(groups, layers, tied, bounds)
    for p in module.parameters():
        p.tensor_model_parallel = sharding_of(p).dim is not None and groups.layout.tp > 1
    decay = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() == 1]
    if not others:
        others = [anchor(module)]
    param_groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    made = {"adamw": lambda: torch.optim.AdamW(param_groups, lr=0.01, betas=betas, fused=True),
            "adamw_loop": lambda: torch.optim.AdamW(param_groups, lr=0.01, betas=betas),
            "sgd": lambda: torch.optim.SGD(param_groups, lr=0.1),
            "momentum": lambda: torch.optim.SGD(param_groups, lr=0.1, momentum=0.9)}[optimizer]()
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": BATCH // groups.layout.dp,
                "gradient_clipping": 0.5, "zero_optimization": {"stage": zero}, "steps_per_print": 2**31,
                "zero_allow_untested_optimizer": True}
    if not persist:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if dtype == "bf16":
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    with quiet():
        engine, *_ = deepspeed.initialize(model=module, optimizer=made, config=settings,
                                          mpu=Mpu(groups) if groups.layout.pp == 1 else None)
    return engine, groups


def anchor(module):
    filler = nn.Parameter(torch.zeros(1))
    filler.megnorm_anchor = True
    module.register_parameter("anchor", filler)
    first = next(child for child in module.children() if any(True for _ in child.parameters()))
    first.register_forward_hook(lambda _module, _args, output: output + 0.0 * filler.to(output.dtype).sum())
    return filler


def train(engine, groups, first, steps):
    """Losses of the steps first .. first + steps - 1."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
        target = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator)
        mine = range(groups.at.dp, BATCH, groups.layout.dp)
        micro = [(tokens[i:i + 1], target[i:i + 1]) for i in mine]
        if groups.layout.pp > 1:
            losses.append(float(engine.train_batch(iter(micro))))
            continue
        total = 0.0
        for batch in micro:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            total += float(loss) / len(micro)
        mean = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(mean, group=groups.dp_group)
        losses.append(float(mean) / groups.layout.dp)
    return losses


def save_at(run_dir, engine, groups, step, **options):
    options = {"keep_last": 10, **options}
    return save(run_dir, engine, groups, trainer={"step": step, "samples": step * BATCH}, config={"seed": 1},
                **options)


def write_run(run_dir, settings, before, after):
    """Rank function: train, save at step ``before``, train on; losses of the steps after, and the state."""
    engine, groups = build(**settings)
    train(engine, groups, 0, before)
    save_at(run_dir, engine, groups, before)
    return train(engine, groups, before, after), local_state(engine)


def resume_run(run_dir, settings, after, save_again=False):
    """Rank function: load the newest of run_dir, train on; the same results."""
    engine, groups = build(**settings)
    train(engine, groups, 50, 2)  # other weights, moments and count of updates: what isn't loaded is wrong
    found = storage.find_newest(run_dir)
    loaded = load(found.path, engine, groups)
    step = loaded.manifest.step
    losses = train(engine, groups, step, after)
    if save_again:
        save_at(run_dir, engine, groups, step + after)
    return losses, local_state(engine)


def round_trip(run_dir, settings, before, after):
    """Rank function: ``write_run``, then ``resume_run`` in a new engine."""
    return write_run(run_dir, settings, before, after), resume_run(run_dir, settings, after)


def local_state(engine):
    """Every value this rank owns, as {name/key: array}, plus the count of updates."""
    from megnorm.engine.state import optimizer_step

    state = {f"{sharding_of(p).name}/{key}": value.clone().numpy()
             for p, values in read_state(engine) for key, value in values.items()}
    return state, optimizer_step(engine)


def read_files(path):
    """Every tensor of a checkpoint, whole, by its manifest: {name/key: tensor}."""
    manifest = storage.verify(path)
    whole = {}
    for name, entry in manifest.tensors.items():
        for key in entry.keys:
            parts = []
            for part in entry.parts:
                with safe_open(path / part.file, framework="pt") as file:
                    parts.append(file.get_tensor(f"{name}/{key}"))
            whole[f"{name}/{key}"] = torch.cat(parts, entry.dim) if len(parts) > 1 else parts[0]
    return whole, manifest


def bare_engine(groups, steps=1, layers=1):
    """What the checkpoint code needs of an engine, around a plain torch optimizer; no DeepSpeed start-up."""
    module = build_module(groups, layers, False, None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(steps):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer, micro_steps=steps,
                           global_steps=steps, device=torch.device("cpu"),
                           gradient_accumulation_steps=lambda: 1, zero_optimization_stage=lambda: 0)
