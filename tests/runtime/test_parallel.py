"""Several devices, spread arrays and several processes compute what one device computes."""

import dataclasses
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import (
    AS_A_USER,
    SMALL,
    TOY,
    assert_same,
    batches_and_fresh,
    everything,
    random_params,
    rows,
    run,
)
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

import data
import optimizers
import recipe
import train
from kernels import choice
from runtime import checkpoint, cores, parallel

# Not the defaults, because: eigenvectors of larger factors are not unique; a large system takes
# longer to solve, and rounds more.
CHANGES = {"soap": {"largest": 8}, "gn_cg": {"damping": 0.1, "cg_steps": 4}}


def assert_close(a, b, **tolerance):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), **tolerance), a, b
    )


def stepped(case):
    """The state and the metrics of an outer step on a toy network, with four sequences a batch.

    Of SOAP two steps, as the first only makes its basis.
    """
    module, cls, _ = recipe.METHODS[case]
    config = cls(TOY, 2, 3, **CHANGES.get(case, {}))
    state = parallel.jit(module.init, static_argnums=1)(random_params(TOY), config)
    if case == "soap":
        state, _ = module.update(state, *batches_and_fresh(TOY, 4), config)
    return module.update(state, *batches_and_fresh(TOY, 4), config)


def test_devices_share_muons_matrices():
    """Of 16 matrices each of four devices orthogonalizes four; only the results are gathered."""
    network = dataclasses.replace(TOY, n_layers=4, d_model=32, d_ff=48)
    optimizer = optimizers.muon(0.1, 0.9, 0.01, 1.0)
    params = random_params(network)
    steps, flops = [], []
    for n in (1, 2, 4):
        mesh = parallel.mesh(n)
        assert mesh.size == n
        with jax.set_mesh(mesh):
            args = params, parallel.jit(optimizer.init)(params), params
            program = parallel.jit(optimizer.update).lower(*args).compile()
            steps.append(program(*args)[0])
        flops.append(program.cost_analysis()["flops"])
        gathered = len(re.findall(r" all-gather\(", program.as_text()))
        assert gathered == (3 if n > 1 else 0)  # 16 of 32 x 32, 4 of 32 x 48, 4 of 48 x 32
    assert (
        flops[1] < 0.6 * flops[0] and flops[2] < 0.6 * flops[1]
    )  # nearly all of it are these products
    for step in steps[1:]:
        assert_close(step, steps[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", recipe.METHODS)
def test_every_method_makes_the_same_step_on_any_number_of_devices(float64, monkeypatch, case):
    """On one, on two, and on four with spread arrays, of which each device then has a fourth."""
    expected = stepped(case)
    for n, shard in ((2, False), (4, True)):
        monkeypatch.setattr(jax, "local_device_count", lambda n=n: n)
        mesh = parallel.mesh(4, shard)
        assert mesh.size == n
        with jax.set_mesh(mesh):
            state, metrics = stepped(case)
        assert_close((state, metrics), expected, rtol=1e-7, atol=1e-9)
        cut = [a for a in jax.tree.leaves(state) if a.ndim > 1]
        assert len(cut) > 20
        for a in cut:
            (part,) = {shard.data.size for shard in a.addressable_shards}
            assert part == (a.size // 4 if shard else a.size) and len(a.addressable_shards) == n


def test_the_program_of_an_inner_batch_is_compiled_once(caplog):
    """Of a baseline on four devices, in two updates of two inner batches each."""
    module, cls, _ = recipe.METHODS["adamw"]
    config = cls(TOY, 2, 3)
    with jax.set_mesh(parallel.mesh(4)):
        state = parallel.jit(module.init, static_argnums=1)(random_params(TOY), config)
        jax.clear_caches()
        with jax.log_compiles():
            for _ in range(2):
                state, _ = module.update(state, *batches_and_fresh(TOY, 4), config)
    programs = [message for message in caplog.messages if "Compiling jit(accumulate)" in message]
    assert len(programs) == 1


def test_an_array_is_cut_along_its_largest_axis_that_divides():
    mesh, zeros = (
        parallel.mesh(4, shard=True),
        lambda *shape: jax.eval_shape(lambda: np.zeros(shape)),
    )
    assert parallel.spec(mesh, zeros(3, 8, 16)) == PartitionSpec(None, None, "shard")
    assert parallel.spec(mesh, zeros(11, 8)) == PartitionSpec(None, "shard")
    assert parallel.spec(mesh, zeros(16, 8)) == PartitionSpec("shard")
    for whole in (zeros(), zeros(16), zeros(3, 5)):
        assert parallel.spec(mesh, whole) == PartitionSpec()
    assert parallel.spec(parallel.mesh(4), zeros(16, 8)) == PartitionSpec()


def test_a_device_sees_its_own_rows_or_all_of_them():
    """Of eight rows two; of six, which four devices cannot share, all. The mean is the same."""
    seen = []

    def f(x, tokens):
        seen.append(tokens.shape)
        return x * tokens.mean()

    for n, local in ((8, 2), (6, 6)):
        tokens = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
        with jax.set_mesh(parallel.mesh(4)):
            np.testing.assert_allclose(parallel.mean(f)(np.float32(2), tokens), 2 * tokens.mean())
        assert seen[-1] == (local, 3)
        placed = parallel.put(parallel.mesh(4), tokens, parallel.rows)
        assert placed.addressable_shards[0].data.shape == (local, 3)
        np.testing.assert_array_equal(placed, tokens)


def test_a_run_is_the_same_on_one_two_and_four_devices_and_spread(here, capsys):
    """To the rounding of float32. The opening says how many are used and how many are idle."""
    for out, n, more in (("a", 1, []), ("b", 2, []), ("c", 4, []), ("d", 4, ["--shard", "true"])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "local_device_count", lambda n=n: n)
            assert run("--method", "gn", "--out", out, *more) == 0
        said = capsys.readouterr().out
        assert f"parameters, float32 on {n} x cpu" in said and (f"{4 - n} idle" in said) == (n < 4)
    for out in ("b", "c", "d"):
        assert_close(everything(out), everything("a"), rtol=1e-2, atol=1e-4)
        assert_close(
            [row["val_loss"] for row in rows(out)],
            [row["val_loss"] for row in rows("a")],
            rtol=1e-5,
        )


def test_a_checkpoint_of_four_devices_goes_on_on_two(here, monkeypatch):
    """Spread over four, stopped in its second step, spread over two; the state on disk is whole."""
    flags = ["--method", "muon", "--shard", "true"]
    assert run(*flags, "--out", "whole") == 0
    original = data.Ahead.__call__

    def stop(self, index, check):
        if index == 2 + 3 + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, index, check)

    monkeypatch.setattr(data.Ahead, "__call__", stop)
    assert run(*flags, "--out", "r") == 143
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert run(*flags, "--out", "r") == 0
    assert_close(everything("r"), everything("whole"), rtol=1e-2, atol=1e-4)


def test_the_most_devices_that_divide_an_inner_batch(monkeypatch):
    assert [parallel.mesh(n).size for n in (1, 2, 3, 4, 6, 8)] == [1, 2, 3, 4, 3, 4]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match="inner_batch is 3; it must be a multiple of the 2 processes"
    ):
        parallel.mesh(3)


@pytest.mark.parametrize(
    "variables, joins",
    [
        ({}, None),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"},
            ("a:1", 3, 2),
        ),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}, ()),
        ({"SLURM_NTASKS": "2"}, None),
        ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3"}, ()),
    ],
)
def test_processes_join_where_variables_say_that_there_are_several(monkeypatch, variables, joins):
    """A shell inside a SLURM job, where no step was started, is one process."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda **named: calls.append(tuple(named.values()))
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parallel.start()
    assert calls == ([] if joins is None else [joins])


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"COUNT": "2"}, "JAX_NUM_PROCESSES without JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID: "),
        ({"INDEX": "0"}, "JAX_PROCESS_ID without JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES: "),
        ({"ADDRESS": "a:1", "COUNT": "2"}, "JAX_NUM_PROCESSES without JAX_PROCESS_ID: "),
        ({"ADDRESS": "a", "COUNT": "2", "INDEX": "0"}, "JAX_COORDINATOR_ADDRESS is 'a'; it must"),
        ({"ADDRESS": ":1", "COUNT": "2", "INDEX": "0"}, "JAX_COORDINATOR_ADDRESS is ':1'; it must"),
        ({"ADDRESS": "a:b", "COUNT": "2", "INDEX": "0"}, "JAX_COORDINATOR_ADDRESS is 'a:b'; it mu"),
        (
            {"ADDRESS": "a:1", "COUNT": "two", "INDEX": "0"},
            "JAX_NUM_PROCESSES is 'two'; it must be",
        ),
        (
            {"ADDRESS": "a:1", "COUNT": "2", "INDEX": "-1"},
            "JAX_PROCESS_ID is '-1'; it must be a who",
        ),
        (
            {"ADDRESS": "a:1", "COUNT": "2", "INDEX": "2"},
            "JAX_PROCESS_ID is 2; it must be below JAX",
        ),
        (
            {"ADDRESS": "a:1", "COUNT": "0", "INDEX": "0"},
            "JAX_PROCESS_ID is 0; it must be below JAX",
        ),
    ],
)
def test_variables_of_processes_that_make_no_sense_are_refused(monkeypatch, variables, says):
    """Before anything is joined: a run must not train alone that is meant to be one of several."""
    monkeypatch.setattr(jax.distributed, "initialize", None)
    for name, value in variables.items():
        monkeypatch.setenv(getattr(parallel, name), value)
    with pytest.raises(ValueError) as error:
        parallel.start()
    assert says in str(error.value)


def test_an_mpirun_that_jax_does_not_know_is_refused():
    """Or each process would take itself for a run of its own."""
    with pytest.raises(ValueError, match="Open MPI 5 and later needs JAX_COORDINATOR_ADDRESS"):
        parallel.join({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
    assert not parallel.join({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})


def test_empty_variables_are_none(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", None)
    for name in (parallel.ADDRESS, parallel.COUNT, parallel.INDEX):
        monkeypatch.setenv(name, "")
    assert not parallel.join(os.environ)


def test_a_flag_for_gpus_is_added_where_there_may_be_one_and_nowhere_else(tmp_path, monkeypatch):
    """Neither to the name of a file of flags, nor where that or the variable has it already."""
    path = tmp_path / "flags"
    path.write_text("--xla_force_host_platform_device_count=2")
    added = "--xla_gpu_enable_triton_gemm=false"
    monkeypatch.setattr(jax.config, "update", lambda *args: seen.append(args))
    monkeypatch.setattr(type(jax.config), "jax_num_cpu_devices", -1)
    for has_gpu, before, after, chooses_devices in (
        (False, "", "", True),
        (True, "", added, True),
        (True, "--xla_a=1", f"--xla_a=1 {added}", True),
        (True, "--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true", True),
        (True, str(path), str(path), False),
        (True, str(tmp_path / "none"), str(tmp_path / "none"), True),
    ):
        seen = []
        found = "found" if has_gpu else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        monkeypatch.setenv("XLA_FLAGS", before)
        parallel.start()
        assert os.environ["XLA_FLAGS"] == after
        assert bool(seen) == chooses_devices


@pytest.mark.parametrize("optimized", [[], ["-OO"]])
def test_a_platform_that_is_not_there_is_one_line(here, optimized):
    """Of every command that computes on the devices of the platform."""
    root = Path(train.__file__).parent
    for words in (["train.py", *SMALL], ["bench.py"], ["sample.py", "a", "--out", "r"]):
        command = [sys.executable, *optimized, root / words[0], *words[1:]]
        environment = AS_A_USER | {"JAX_PLATFORMS": "rocm"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        start = f"{words[0]}: JAX_PLATFORMS is rocm, but JAX cannot use that: "
        assert done.stderr.startswith(start) and done.stderr.count("\n") == 1, done.stderr
        assert done.returncode == 2 and not done.stdout


def test_a_process_that_may_use_fewer_cores_counts_these(monkeypatch):
    """As under taskset, or in a job of a cluster."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    assert cores.available_cores() == 3


def test_matrix_products_are_in_what_suits_the_device(monkeypatch):
    """By default; what came out is in config.json, and a flag decides."""

    def dtype(*more):
        return recipe.configure(["--model", "tiny", *more]).values["dtype"]

    assert (dtype(), dtype("--dtype", "bfloat16")) == ("float32", "bfloat16")
    monkeypatch.setattr(choice, "default_dtype", lambda: "bfloat16")
    assert (dtype(), dtype("--dtype", "float32")) == ("bfloat16", "float32")
    assert recipe.configure(["--model", "tiny"]).network.dtype == "bfloat16"


def test_programs_are_kept_between_runs_and_make_the_same_run(here):
    """The second run finds them in data/compiled and ends bitwise where the first did."""
    command = [
        sys.executable,
        train.__file__,
        *SMALL,
        "--data",
        "text.txt",
        "--method",
        "adamw",
        "--steps",
        "1",
    ]
    found = []
    for out in ("a", "b"):
        done = subprocess.run(
            [*command, "--out", out], capture_output=True, text=True, env=AS_A_USER
        )
        assert done.returncode == 0 and not done.stderr
        found.append(
            {path.name: path.stat().st_mtime_ns for path in here.glob("data/compiled/*/*-cache")}
        )
    assert (
        found[0] and found[0].items() <= found[1].items()
    )  # what compiles in half a second may be there once only
    assert_same(everything("a"), everything("b"))
    for path in here.glob("data/compiled/*/*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    strict = AS_A_USER | {"JAX_RAISE_PERSISTENT_CACHE_ERRORS": "true"}
    assert subprocess.run(
        [*command, "--out", "c"], capture_output=True, env=strict
    ).returncode  # so they are read


# ---- several processes ----


def together(*flags):
    """Two processes that train as one, started."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, train.__file__, *SMALL, "--data", "text.txt", *flags]
    env = AS_A_USER | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_NUM_CPU_DEVICES": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(i)}, **pipes) for i in range(2)
    ]


def ended(processes):
    """Status, output and errors of each; none is left behind."""
    try:
        said = [process.communicate(timeout=300) for process in processes]
        return [
            (process.returncode, *texts) for process, texts in zip(processes, said, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("method, more", [("muon", []), ("gn", ["--shard", "true"])])
def test_two_processes_train_as_one(here, method, more):
    """The same parameters; only the first one writes and prints."""
    (status, out, err), (status1, out1, err1) = ended(
        together("--method", method, "--out", "two", *more)
    )
    assert (status, status1) == (0, 0), err + err1
    assert "parameters, float32 on 4 x cpu" in out and "validation loss" in out
    words = {"tokens", "train_loss", "validation"}  # Gloo's threads say how they are connected
    assert words <= set(out.split()) and not words & set(out1.split()), out1
    assert run("--method", method, "--out", "one", *more) == 0
    assert_close(everything("two"), everything("one"), rtol=1e-2, atol=1e-4)
    assert_close(
        [row["val_loss"] for row in rows("two")],
        [row["val_loss"] for row in rows("one")],
        rtol=1e-5,
    )
    assert not list(here.glob("**/*draft*"))


def test_a_signal_to_one_process_ends_both(here):
    """SIGTERM to the second: both end with its status, and the run can be resumed."""
    flags = ["--method", "gn", "--out", "r", "--steps", "2000"]
    processes = together(*flags)
    while (
        all(process.poll() is None for process in processes)
        and not Path("r/checkpoint.npz").exists()
    ):
        threading.Event().wait(0.05)
    processes[1].send_signal(signal.SIGTERM)
    for status, _, err in ended(processes):
        assert status == 143, err
        assert "the same command goes on from here" in err
    assert everything("r")[".t"] < 2000


def test_the_first_process_works_before_the_others(tmp_path, monkeypatch):
    """Two of them, as threads: the second finds what the first has left, and no file stays."""
    process = threading.local()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process.index)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda number: 7)
    monkeypatch.setattr(parallel, "wait", threading.Barrier(2).wait)
    order = []

    def run_as(index):
        process.index = index

        def work():
            order.append(index)
            if index == 0:
                time.sleep(0.5)  # the others have every chance to be too early
            order.append(index)
            return index

        return parallel.first(work, tmp_path / "data")

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(run_as, index) for index in (1, 0)]
        assert [result.result(timeout=60) for result in results] == [1, 0]
    assert order == [0, 0, 1, 1]
    assert list((tmp_path / "data").iterdir()) == []


def test_who_waits_long_for_another_process_says_for_what_and_once(tmp_path, capsys, monkeypatch):
    """As where two machines do not share a folder, which would be waited for without an end."""
    monkeypatch.setattr(parallel, "PATIENCE", 0)
    timer = threading.Timer(1.0, (tmp_path / "done").touch)
    timer.start()
    parallel.wait_for([tmp_path / "done"])
    assert capsys.readouterr().err == f"waits for processes that share {tmp_path}\n"
    parallel.wait_for([tmp_path / "done"])
    assert capsys.readouterr().err == ""


# ---- reading ahead ----


def test_the_next_batch_is_read_before_it_is_asked_for_and_none_beyond_the_end():
    read, seen = [], threading.Semaphore(0)

    def source(index):
        read.append(index)
        seen.release()
        return 10 * index

    ahead = data.Ahead(source, 4)
    assert (
        ahead(1) == 10 and seen.acquire(timeout=60) and seen.acquire(timeout=60) and read == [1, 2]
    )
    assert [ahead(2), ahead(3)] == [20, 30]
    assert read == [1, 2, 3] and ahead.waited > 0


def test_what_goes_wrong_in_the_thread_is_raised_where_the_batch_is_asked_for():
    def source(index):
        if index == 2:
            raise OSError("disk gone")
        return index

    ahead = data.Ahead(source, 9)
    assert ahead(1) == 1
    with pytest.raises(OSError, match="disk gone"):
        ahead(2)


def test_a_read_that_fails_ends_the_run_with_status_1(here, capsys, monkeypatch):
    original = data.batch

    def batch(tokens, context, size, seed, index):
        if index == 4:
            raise OSError("disk gone")
        return original(tokens, context, size, seed, index)

    monkeypatch.setattr(data, "batch", batch)
    assert run("--method", "muon", "--out", "r") == 1
    assert capsys.readouterr().err == "train.py: disk gone\n"


def test_time_spent_waiting_for_input_is_logged(here):
    assert run("--method", "muon", "--out", "r") == 0
    assert all(0 < row["input_wait"] < row["seconds"] for row in rows("r"))


def test_a_spread_array_is_saved_whole(tmp_path):
    a = np.arange(32, dtype=np.float32).reshape(4, 8)
    spread = parallel.put(parallel.mesh(4, shard=True), {"a": a})
    checkpoint.save(tmp_path / "a.npz", spread)
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "a.npz", spread)["a"], a)
