"""A save that fails or is killed leaves the last complete checkpoint, and every rank learns it."""

import errno
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_toy import bare_engine, read_files, save_at

from megnorm.checkpoint import storage
from megnorm.checkpoint.load import choose_together, load
from megnorm.checkpoint.resume import CheckpointError
from megnorm.checkpoint.save import ReplicasDiffer, SaveFailed
from megnorm.parallel.groups import make_groups
from megnorm.plan.layout import Layout
from megnorm.testing.ranks import PRELOAD, run_ranks


def folder_names(run_dir):
    return sorted(os.listdir(storage.checkpoints_dir(run_dir)))


def no_space_on(rank, original):
    def fail(path, *rest):
        if dist.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, *rest)
    return fail


def save_without_space(run_dir, rank, function):
    """Rank function: a good save, one that fails on ``rank``, a good one; what was seen after the failure."""
    groups = make_groups(Layout(1, 1, 2), torch.device("cpu"))
    engine = bare_engine(groups)
    save_at(run_dir, engine, groups, 1)
    original = getattr(storage, function)
    setattr(storage, function, no_space_on(rank, original))
    with pytest.raises(SaveFailed) as caught:
        save_at(run_dir, engine, groups, 2, keep_last=1)
    names, newest = folder_names(run_dir), storage.find_newest(run_dir)
    dist.barrier()
    setattr(storage, function, original)
    save_at(run_dir, engine, groups, 3, keep_last=1)
    return str(caught.value), names, newest.path.name, newest.skipped, folder_names(run_dir)


@pytest.mark.parametrize("rank, function", [(0, "write_file"), (1, "write_file"), (0, "sync_folder")])
def test_no_space_left(tmp_path, rank, function):
    """Reported on all ranks with the reason; only the old checkpoint stays; the next save works."""
    for message, names, newest, skipped, at_the_end in run_ranks(save_without_space, 2, str(tmp_path), rank,
                                                                 function):
        assert "No space left on device" in message
        assert names == ["latest", "step-00000001"]
        assert (newest, skipped) == ("step-00000001", [])
        assert at_the_end == ["latest", "step-00000003"]


def save_where_it_is_not_allowed(run_dir):
    groups = make_groups(Layout(1, 2, 1), torch.device("cpu"))
    Path(run_dir, "checkpoints").write_text("a file is in the way")
    with pytest.raises(SaveFailed) as caught:
        save_at(run_dir, bare_engine(groups), groups, 1)
    return str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path):
    messages = run_ranks(save_where_it_is_not_allowed, 2, str(tmp_path))
    assert messages[0] == messages[1] and "checkpoints" in messages[0]


def fail_after_it_is_complete(run_dir):
    groups = make_groups(Layout(1, 1, 1), torch.device("cpu"))
    engine = bare_engine(groups)
    save_at(run_dir, engine, groups, 1)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage.point = fail
    return save_at(run_dir, engine, groups, 2, keep_last=1).warnings


def test_a_failure_after_the_rename_is_a_warning(tmp_path):
    [[warning]] = run_ranks(fail_after_it_is_complete, 1, str(tmp_path))
    assert "step-00000002 is complete, but" in warning and "Input/output error" in warning
    assert storage.find_newest(tmp_path).path.name == "step-00000002"


def save_unequal(run_dir):
    groups = make_groups(Layout(1, 1, 2), torch.device("cpu"))
    engine = bare_engine(groups)
    save_at(run_dir, engine, groups, 1)
    if groups.at.tp == 1:  # one bit of one moment of one replica
        p = engine.module.get_submodule("1").gain
        engine.optimizer.state[p]["exp_avg"].view(torch.int32)[3] ^= 1
    with pytest.raises(ReplicasDiffer) as caught:
        save_at(run_dir, engine, groups, 2)
    return str(caught.value), folder_names(run_dir)


def test_replicas_that_differ_are_not_saved(tmp_path):
    for message, names in run_ranks(save_unequal, 2, str(tmp_path)):
        assert "layers.0.gain" in message and "odd" not in message and "up" not in message
        assert names == ["latest", "step-00000001"]


def choose_on_two(run_dir):
    found = []
    for wanted in ("auto", "none"):
        try:
            found.append(choose_together(run_dir, wanted).path)
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_all_ranks_get_one_choice(tmp_path):
    assert run_ranks(choose_on_two, 2, str(tmp_path)) == [[None, None]] * 2
    run_ranks(save_steps, 2, str(tmp_path), [1, 2], 2)
    first, second = run_ranks(choose_on_two, 2, str(tmp_path))
    assert first == second and first[0].name == "step-00000002"
    assert "beside the checkpoints" in first[1]


# --- kill at every point ---

POINTS = ("os.open", "open", "os.fsync", "os.rename", "os.replace", "os.mkdir", "os.unlink", "os.rmdir")


def count_or_die(at):
    """Patch the calls that change the disk: the ``at``-th ends the process before it happens."""
    import builtins

    log = []

    def wrap(name, original):
        def call(*args, **options):
            target = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else args[0]
            if not isinstance(target, (str, int)) or (isinstance(target, str) and "checkpoints" not in target
                                                      and name not in ("os.unlink", "os.rmdir")):
                return original(*args, **options)
            log.append(f"{name} {target}")
            if len(log) == at:
                os._exit(9)
            return original(*args, **options)
        return call

    for point in POINTS:
        module, name = (builtins, point) if "." not in point else (os, point.split(".")[1])
        setattr(module, name, wrap(point, getattr(module, name)))
    return log


def save_steps(run_dir, steps, dp, keep_last=10):
    groups = make_groups(Layout(1, dp, 1), torch.device("cpu"))
    engine = bare_engine(groups)
    for step in steps:
        save_at(run_dir, engine, groups, step, keep_last=keep_last)


def save_until(run_dir, step, at):
    """In a fork: the second save of a run, ended before its ``at``-th operation on the disk (0: never)."""
    dist.init_process_group("gloo", init_method=f"file://{run_dir}/store", rank=0, world_size=1)
    groups = make_groups(Layout(1, 1, 1), torch.device("cpu"))
    engine = bare_engine(groups, steps=2)
    log = count_or_die(at)
    save_at(run_dir, engine, groups, step, keep_last=1, file_bytes=1000)
    Path(run_dir, "log").write_text("\n".join(log))
    os._exit(0)


def fork(function, *args):
    """Exit code of a function in a fork of this process."""
    child = os.fork()
    if child == 0:
        try:
            function(*args)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(folder, step, pipe):
    """Process without threads of a process group: a run saved whole, and one killed at each point."""
    torch.set_num_threads(1)
    folder = Path(folder)
    shutil.copytree(folder / "base", folder / "whole")
    assert fork(save_until, folder / "whole", step, 0) == 0
    log = (folder / "whole" / "log").read_text().split("\n")
    for at in range(1, len(log) + 1):
        shutil.copytree(folder / "base", folder / str(at))
        assert fork(save_until, folder / str(at), step, at) == 9, log[at - 1]
    pipe.send(log)


def run_kills(folder, step):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=kill_everywhere, args=(str(folder), step, theirs))
    process.start()
    theirs.close()
    log = ours.recv()
    process.join()
    return log


@pytest.mark.parametrize("step", [2, 1])
def test_killed_at_any_point_one_complete_checkpoint_is_found(tmp_path, step):
    """keep_last=1: kill the second save (of the next step, or of the same step again) before every operation
    on the disk. The newest complete one is the old or the new, never none; and the next save tidies up."""
    run_ranks(save_steps, 1, str(tmp_path / "base"), [1], 1)
    log = run_kills(tmp_path, step)
    assert len(log) >= 20, log
    old, new = (read_files(storage.find_newest(tmp_path / run).path) for run in ("base", "whole"))
    assert (old[1].optimizer_step, new[1].optimizer_step) == (1, 2)
    outcomes = []
    for at in range(1, len(log) + 1):
        found = storage.find_newest(tmp_path / str(at))
        assert found.path is not None, log[at - 1]
        tensors, manifest = read_files(found.path)
        expected, expected_manifest = old if manifest.optimizer_step == 1 else new
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert manifest.trainer == expected_manifest.trainer  # weights and trainer state are of one step
        outcomes.append(manifest.optimizer_step)
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}
    for names in run_ranks(save_in_each, 1, [str(tmp_path / str(at)) for at in range(1, len(log) + 1)])[0]:
        assert names == ["latest", "step-00000004"]


def save_in_each(run_dirs):
    groups = make_groups(Layout(1, 1, 1), torch.device("cpu"))
    engine = bare_engine(groups)
    for run_dir in run_dirs:
        save_at(run_dir, engine, groups, 4, keep_last=1)
    return [folder_names(run_dir) for run_dir in run_dirs]


def die_in_save(run_dir, victim, at):
    groups = make_groups(Layout(1, 1, 2), torch.device("cpu"))
    engine = bare_engine(groups)
    save_at(run_dir, engine, groups, 1)
    if dist.get_rank() == victim:
        count_or_die(at)
    save_at(run_dir, engine, groups, 2, keep_last=1)


@pytest.mark.parametrize("victim, at", [(0, 2), (1, 1), (1, 2), (0, 9)])
def test_one_of_two_ranks_killed(tmp_path, victim, at):
    """The other ends with an error, not a hang; a restart loads the older checkpoint."""
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(die_in_save, 2, str(tmp_path), victim, at, timeout=30)
    assert storage.find_newest(tmp_path).path.name == "step-00000001"
    assert run_ranks(load_newest, 2, str(tmp_path)) == [1, 1]


def load_newest(run_dir):
    groups = make_groups(Layout(1, 1, 2), torch.device("cpu"))
    engine = bare_engine(groups, steps=5)
    return load(choose_together(run_dir, "auto").path, engine, groups).manifest.step
