"""A run on several devices: each has its share of a batch's sequences, and what they compute is averaged.

The devices are a mesh with one axis, the context of a run (`jax.set_mesh`), whose name says how parameters, optimizer
state and gradient lie. On "data" each device has them whole. On "shard" (--shard true) it has its part of every matrix;
they are gathered before use, and each has its part of the gradient. Outside of `mean` the compiler sees to all of it.
"""

import itertools
import os
import sys
from functools import partial, wraps

import jax
import numpy as np
from jax._src import distributed  # of its barrier there is no public name
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def start():
    """Joins the processes of a run, where variables say that there are several; to be called before JAX is used.

    They are JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID, or what srun and mpirun set.
    Only the first process prints. Where there is one, a CPU becomes a device for each core, as one device hardly uses a
    second. Raises ValueError where one of the three is missing.
    """
    cores, variables = os.cpu_count() or 1, os.environ
    several = variables.get("SLURM_NTASKS", "1") != "1" and "SLURM_STEP_NODELIST" in variables  # not a shell in a job
    if "JAX_COORDINATOR_ADDRESS" in variables:
        count, index = (variables.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
        jax.distributed.initialize(num_processes=count and int(count), process_id=index and int(index))
    elif several or "OMPI_MCA_orte_hnp_uri" in variables:
        jax.distributed.initialize()
    elif jax.config.jax_num_cpu_devices < 0 and "device_count" not in variables.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", min(8, cores))  # 8 sequences are an inner batch of `tiny`
    if "xla_gpu_enable_triton_gemm" not in variables.get("XLA_FLAGS", ""):  # fewer programs to try, and faster here
        variables["XLA_FLAGS"] = variables.get("XLA_FLAGS", "") + " --xla_gpu_enable_triton_gemm=false"
    threads = 2 * max(cores, jax.config.jax_num_cpu_devices)
    variables.setdefault("NPROC", str(threads))  # XLA's: those that wait for a device leave it others
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")


def mesh(inner_batch, shard=False):
    """The mesh of a run: as many devices, the same number of each process, as divide the sequences of an inner batch.

    Raises ValueError where not even one device a process does.
    """
    processes, local = range(jax.process_count()), range(1, jax.local_device_count() + 1)
    most = max((n for n in local if inner_batch % (n * len(processes)) == 0), default=0)
    if not most:
        raise ValueError(f"inner_batch is {inner_batch}; it must be a multiple of the {len(processes)} processes")
    devices = [d for i in processes for d in [d for d in jax.devices() if d.process_index == i][:most]]
    return jax.make_mesh((len(devices),), ("shard" if shard else "data",), (AxisType.Auto,), devices=devices)


def spec(mesh, a):
    """How an array of a state or a gradient lies: a matrix on "shard" in parts along its largest axis that divides."""
    axes = [i for i, size in enumerate(a.shape) if size % mesh.size == 0]
    if mesh.axis_names != ("shard",) or len(a.shape) < 2 or not axes:
        return PartitionSpec()
    return PartitionSpec(*max(axes, key=a.shape.__getitem__) * [None], "shard")


def rows(mesh, tokens):
    """How tokens [B, T+1] lie: each device has its share of the rows, or all where they do not divide."""
    return PartitionSpec() if len(tokens) % mesh.size else PartitionSpec(*mesh.axis_names)


def mean(f):
    """f(.., tokens) as the mean over the devices of what f gives for their `rows` of tokens, int32 [B, T+1]."""

    def averaged(*args):
        mesh, (*trees, tokens) = jax.sharding.get_abstract_mesh(), args
        if mesh.size < 2:
            return f(*args)
        (name,) = mesh.axis_names
        parts = jax.tree.map(partial(spec, mesh), trees)
        out = jax.tree.map(partial(spec, mesh), jax.eval_shape(f, *args)) if name == "shard" else PartitionSpec()
        whole = lambda a, s: jax.lax.all_gather(a, name, axis=len(s) - 1, tiled=True) if len(s) else a
        scatter = lambda a, axis: jax.lax.psum_scatter(a, name, scatter_dimension=axis, tiled=True) / mesh.size
        average = lambda s, tree: scatter(tree, len(s) - 1) if len(s) else jax.lax.pmean(tree, name)
        body = lambda *args: jax.tree.map(average, out, f(*jax.tree.map(whole, list(args[:-1]), parts), args[-1]))
        split = jax.shard_map(body, in_specs=(*parts, rows(mesh, tokens)), out_specs=out, check_vma=False)
        return split(*args)

    return averaged


def jit(f, **options):
    """jax.jit of f, the arrays of whose result lie as `spec` says."""

    @wraps(f)
    def laid(*args, **named):
        mesh, result = jax.sharding.get_abstract_mesh(), f(*args, **named)
        lay = lambda a: jax.lax.with_sharding_constraint(a, spec(mesh, a))
        return result if mesh.size < 2 else jax.tree.map(lay, result)

    return jax.jit(laid, **options)


def shared(f):
    """f of a stack [n, ..] of arrays, each for itself: each device does its share of them, where they divide."""

    def gathered(stack):
        mesh, lay = jax.sharding.get_abstract_mesh(), jax.lax.with_sharding_constraint
        if mesh.size < 2 or len(stack) % mesh.size:
            return f(stack)
        stack = lay(stack, spec(mesh, stack))  # or what made it would be shared too, and gathered
        return lay(f(lay(stack, PartitionSpec(*mesh.axis_names))), spec(mesh, stack))

    return gathered


def put(mesh, tree, parts=spec):
    """Arrays that every process has, on the devices as parts(mesh, a) says of each."""
    place = lambda a: NamedSharding(mesh, parts(mesh, a))
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, place(a), np.asarray(a).__getitem__), tree)


# ---- what every process must call, or the others wait ---------------------------------------------------------------


def whole(a):
    """An array in NumPy, wherever its parts are."""
    parts = isinstance(a, jax.Array) and not a.is_fully_addressable
    return multihost_utils.process_allgather(a, tiled=True) if parts else np.asarray(a)


def largest(number):
    """The largest of the processes' numbers."""
    return number if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.int32(number)).max())


def wait():
    """Until every process is here."""
    multihost_utils.sync_global_devices("wait")


def first(work):
    """work(), in process 0 before the others, which then find what it has left on disk; it may take days."""
    if jax.process_count() == 1:
        return work()
    if jax.process_index() > 0:
        meet()
    try:
        return work()
    finally:
        meet()
        if jax.process_index() == 0:
            meet()


def meet(places=itertools.count()):  # noqa: B008  one count for all calls
    """`wait`, for days: a collective gives up after half a minute."""
    distributed.global_state.client.wait_at_barrier(f"meet {next(places)}", 7 * 86_400_000)
