"""A run on several devices: each computes on its share of a batch's sequences, and the results are
averaged.

The devices form a mesh with one axis, which is the context of a run (`jax.set_mesh`). The name of
the axis says where the arrays of a state (parameters, optimizer state) and the gradient are:

    "data"    every device holds all of them
    "shard"   (--shard true) every device holds a part of each matrix, and a part of the gradient;
              `mean` gathers the matrices before it uses them

A method needs two of these functions: `mean` around what it computes from a batch, and `jit` in
place of jax.jit. On one device both change nothing, but for micro-batches.
"""

import importlib.util
import os
import secrets
import sys
import time
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from runtime.cores import available_cores

PATIENCE = 60  # seconds of waiting for other processes, after which a line says so

# For several processes: host:port of the first one, how many there are, which of them this one is.
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def start():
    """Joins the processes of a run if variables say that there are several, and chooses devices.

    Call it before JAX is used. The variables are ADDRESS, COUNT and INDEX, or what srun or mpirun
    sets. Only the first process writes to standard output. Raises ValueError if a variable makes no
    sense, if one of the three is missing, or if there are no devices of the kind that JAX_PLATFORMS
    asks for.

    A single process turns a CPU into as many devices as it has cores, but 8 at most, the sequences
    in an inner batch of `tiny`: one device hardly uses a second core.
    """
    cores = available_cores()
    flags = read_xla_flags()
    alone = not join(os.environ)
    if alone and jax.config.jax_num_cpu_devices < 0 and "host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", min(8, cores))

    skip_triton_products(flags)
    # XLA reads from NPROC how many threads it may start. A thread that waits for another device
    # is blocked, so there must be more threads than devices.
    threads = 2 * max(cores, jax.config.jax_num_cpu_devices)
    os.environ.setdefault("NPROC", str(threads))
    check_devices()
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the process ends


def join(variables):
    """Joins the processes of a run; returns False if this one is alone. Raises ValueError."""
    # A shell inside a SLURM job also has SLURM_NTASKS, but no step.
    srun = variables.get("SLURM_NTASKS", "1") != "1" and "SLURM_STEP_NODELIST" in variables
    mpirun = "OMPI_MCA_orte_hnp_uri" in variables
    given = {name: variables[name] for name in (ADDRESS, COUNT, INDEX) if variables.get(name)}
    if not given:
        if variables.get("OMPI_COMM_WORLD_SIZE", "1") != "1" and not mpirun:
            # JAX finds the others by a variable that only earlier versions set.
            raise ValueError(f"mpirun of Open MPI 5 and later needs {ADDRESS}, {COUNT}, {INDEX}")
        if srun or mpirun:
            jax.distributed.initialize()
        return srun or mpirun

    check_variables(given)
    missing = {ADDRESS, COUNT, INDEX} - set(given)
    if missing and not (srun or mpirun):  # these tell JAX what is missing
        names = ", ".join(sorted(missing))
        raise ValueError(f"{', '.join(given)} without {names}: several processes need all three")
    sizes = {}  # srun and mpirun tell JAX what is not given
    if COUNT in given:
        sizes["num_processes"] = int(given[COUNT])
    if INDEX in given:
        sizes["process_id"] = int(given[INDEX])
    jax.distributed.initialize(coordinator_address=given.get(ADDRESS), **sizes)
    return True


def check_variables(given):
    """Raises ValueError if a value of {name: value} is none that `join` can use."""
    for name in (COUNT, INDEX):
        value = given.get(name, "1")
        if not value.isdecimal():
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if COUNT in given and int(given.get(INDEX, 0)) >= int(given[COUNT]):
        index = given.get(INDEX, 0)
        raise ValueError(f"{INDEX} is {index}; it must be below {COUNT}, which is {given[COUNT]}")
    host, _, port = given.get(ADDRESS, "host:1").rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"{ADDRESS} is {given[ADDRESS]!r}; it must be host:port")


def check_devices():
    """Raises ValueError if there are no devices of the kind that JAX_PLATFORMS asks for."""
    platforms = jax.config.jax_platforms
    try:
        jax.devices()
    except (RuntimeError, AssertionError, AttributeError) as error:  # whichever JAX comes upon
        if not platforms:
            raise
        reason = "it finds none here"
        if isinstance(error, RuntimeError):
            reason = str(error).partition("\n")[0]
        raise ValueError(
            f"JAX_PLATFORMS is {platforms}, but JAX cannot use that: {reason}"
        ) from None


def read_xla_flags():
    """XLA's flags as the person who started this has set them: in XLA_FLAGS, or in a file."""
    text = os.environ.get("XLA_FLAGS", "")
    if is_file_name(text):
        with suppress(OSError):
            return Path(text).read_text(encoding="utf-8", errors="replace")
    return text


def is_file_name(xla_flags):
    """Whether XLA takes the value of XLA_FLAGS for the name of a file of flags."""
    return bool(xla_flags.strip()) and not xla_flags.lstrip().startswith("-")


def skip_triton_products(flags):
    """Tells XLA not to try Triton for matrix products on GPUs, unless XLA_FLAGS decide that."""
    before = os.environ.get("XLA_FLAGS", "")
    # Without JAX's plugin for GPUs it would be of no use, and a later XLA that does not know the
    # flag would end here.
    has_plugin = importlib.util.find_spec("jax_plugins") is not None
    if has_plugin and not is_file_name(before) and "xla_gpu_enable_triton_gemm" not in flags:
        # XLA then has fewer kernels to try for each product as it compiles, and ours are faster.
        os.environ["XLA_FLAGS"] = f"{before} --xla_gpu_enable_triton_gemm=false".lstrip()


def mesh(inner_batch, shard=False):
    """The mesh of a run on as many devices as divide an inner batch of so many sequences.

    Every process takes part with the same number of devices. Raises ValueError if not even one
    device per process divides the inner batch.
    """
    processes = jax.process_count()
    counts = range(1, jax.local_device_count() + 1)
    dividing = [n for n in counts if inner_batch % (n * processes) == 0]
    if not dividing:
        required = f"a multiple of the {processes} processes"
        raise ValueError(f"inner_batch is {inner_batch}; it must be {required}")

    devices = []
    for process in range(processes):
        own = [device for device in jax.devices() if device.process_index == process]
        devices += own[: max(dividing)]
    name = "shard" if shard else "data"
    return jax.make_mesh((len(devices),), (name,), (AxisType.Auto,), devices=devices)


def spec(mesh, a):
    """Where an array of a state or a gradient is.

    On "shard", a matrix is cut along the largest axis that the number of devices divides. Every
    other array is whole on every device.
    """
    axes = [axis for axis, size in enumerate(a.shape) if size % mesh.size == 0]
    if mesh.axis_names != ("shard",) or len(a.shape) < 2 or not axes:
        return PartitionSpec()
    largest_axis = max(axes, key=a.shape.__getitem__)
    before = [None] * largest_axis
    return PartitionSpec(*before, "shard")


def rows(mesh, tokens):
    """Where tokens [B, T+1] are: each device has its share of the B rows.

    If the devices do not divide B, every device has all rows.
    """
    if len(tokens) % mesh.size:
        return PartitionSpec()
    return PartitionSpec(*mesh.axis_names)


def mean(f, micro_batch=0):
    """f averaged over the devices, each of which calls it with its share of the tokens.

    f(*trees, tokens) -> tree of arrays. trees: of arrays, such as the parameters, whole in every
    call. tokens: int32 [B, T+1]; with n devices, a call gets B/n of the rows. What f returns must
    be a mean over its rows: as every share has the same size, the mean of the n results is then the
    mean over all B rows. If n does not divide B, every device computes on all rows. Use it inside a
    jitted function. On one device it is f, but for micro-batches.

    micro_batch: how many rows a device computes on at once, at most; 0 = its whole share. The mean
    of the results is taken, so that f needs memory for so many rows only.
    """
    f = in_parts(f, micro_batch)

    def averaged(*args):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size < 2:
            return f(*args)

        *trees, tokens = args
        (axis,) = mesh.axis_names
        tree_specs = jax.tree.map(partial(spec, mesh), trees)
        result_specs = PartitionSpec()  # of the whole tree: every device has all of it
        if axis == "shard":
            result_specs = jax.tree.map(partial(spec, mesh), jax.eval_shape(f, *args))

        def on_one_device(*args):
            *parts, tokens = args
            whole_trees = jax.tree.map(partial(gather, mesh), tree_specs, parts)
            result = f(*whole_trees, tokens)
            return jax.tree.map(partial(average, mesh), result_specs, result)

        on_all_devices = jax.shard_map(
            on_one_device,
            in_specs=(*tree_specs, rows(mesh, tokens)),
            out_specs=result_specs,
            check_vma=False,
        )
        return on_all_devices(*args)

    return averaged


def gather(mesh, where, part):
    """On one device: the whole array of which it has a part, as the spec `where` says."""
    if len(where) == 0:
        return part
    (axis,) = mesh.axis_names
    cut = len(where) - 1  # a spec ends with the axis that is cut
    return jax.lax.all_gather(part, axis, axis=cut, tiled=True)


def average(mesh, where, result):
    """On one device: the mean over all, whole, or of an array the part that `where` gives to it."""
    (axis,) = mesh.axis_names
    if len(where) == 0:
        return jax.lax.pmean(result, axis)
    cut = len(where) - 1
    return jax.lax.psum_scatter(result, axis, scatter_dimension=cut, tiled=True) / mesh.size


def in_parts(f, most):
    """f(*trees, tokens) as the mean over equal parts of tokens [B, T+1], of at most `most` rows.

    most = 0: f itself.
    """
    if not most:
        return f

    def averaged(*args):
        *trees, tokens = args
        size = largest_divisor(len(tokens), most)
        n = len(tokens) // size  # parts
        if n == 1:
            return f(*args)

        def add(total, part):
            return jax.tree.map(jnp.add, total, f(*trees, part)), None

        parts = tokens.reshape(n, size, tokens.shape[1])
        result = jax.eval_shape(f, *trees, parts[0])
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), result)
        total, _ = jax.lax.scan(add, zero, parts)
        return jax.tree.map(lambda a: a / n, total)

    return averaged


def largest_divisor(number, most):
    """The largest number up to `most` that divides `number`."""
    divisor = min(number, most)
    while number % divisor:
        divisor -= 1
    return divisor


def jit(f, **options):
    """jax.jit of f, which leaves the arrays of its result where `spec` says. Options are jax.jit's.

    Two of them matter here. static_argnames or static_argnums: arguments that are no arrays but
    decide which program is compiled, such as a function; a new value compiles anew.
    donate_argnames: arguments whose memory the result takes over. A step that donates its state
    needs no second copy of it, but the caller must not use the old state again.
    """

    @wraps(f)
    def placed(*args, **named):
        result = f(*args, **named)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size < 2:
            return result
        return jax.tree.map(partial(place, mesh), result)

    return jax.jit(placed, **options)


def place(mesh, a):
    """Inside a jitted function: the array a, from here on where `spec` says."""
    return jax.lax.with_sharding_constraint(a, spec(mesh, a))


def shared(f):
    """f(stack) for a stack [n, ..] of arrays, computed by each device for its share of the n.

    f must treat each array of the stack for itself, as Muon's orthogonalization does. If the
    devices do not divide n, every device computes everything.
    """

    def divided(stack):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size < 2 or len(stack) % mesh.size:
            return f(stack)
        # Pinned first: otherwise what made the stack would be divided too, and gathered again.
        stack = place(mesh, stack)
        shares = jax.lax.with_sharding_constraint(stack, PartitionSpec(*mesh.axis_names))
        return place(mesh, f(shares))

    return divided


def shapes(mesh, tree, where=spec):
    """The shapes of a tree of arrays, for programs that are compiled before there are any.

    where(mesh, a): where array a will be.
    """

    def shape_of(a):
        sharding = NamedSharding(mesh, where(mesh, a))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree.map(shape_of, tree)


def put(mesh, tree, where=spec):
    """A tree of arrays that every process has, on the devices: array a as where(mesh, a) says."""

    def put_one(a):
        sharding = NamedSharding(mesh, where(mesh, a))
        return jax.make_array_from_callback(a.shape, sharding, np.asarray(a).__getitem__)

    return jax.tree.map(put_one, tree)


# ---- Between processes: what one of them calls, all must call, or it waits for the others. ----


def whole(a):
    """An array as a NumPy array, whichever devices and processes its parts are on."""
    if isinstance(a, jax.Array) and not a.is_fully_addressable:
        return multihost_utils.process_allgather(a, tiled=True)
    return np.asarray(a)


def largest(numbers):
    """The largest int32 that any process has. For a list of numbers: for each of its places."""
    if jax.process_count() == 1:
        return numbers
    of_all = multihost_utils.process_allgather(np.asarray(numbers, np.int32))
    return of_all.max(axis=0)


def smallest(number):
    """The smallest int32 that any process has."""
    return -int(largest(-number))


def in_any(fact):
    """Whether a fact is true in one process at least."""
    return bool(largest(int(fact)))


def wait():
    """Waits until every process is here.

    At the first exchange of a run, JAX may give up where one process comes 30 s after another.
    """
    multihost_utils.sync_global_devices("wait")


def first(work, folder):
    """work(), in the first process before all others, which then find on disk what it left there.

    It may take days, but processes that wait by JAX may give up after half a minute. So each leaves
    a file in `folder`, which they share, when it is done, and the others wait for that.
    """
    if jax.process_count() == 1:
        return work()
    drawn = np.int32(secrets.randbits(31))  # so that files of a run that was killed do not count
    run_id = int(multihost_utils.broadcast_one_to_all(drawn))
    names = [f"done-{run_id}-{i}" for i in range(jax.process_count())]
    done = [Path(folder) / name for name in names]
    if jax.process_index() > 0:
        wait_for(done[:1])
    try:
        return work()
    finally:
        done[0].parent.mkdir(parents=True, exist_ok=True)
        done[jax.process_index()].touch()
        wait_for(done)
        wait()  # until all have seen the files
        done[jax.process_index()].unlink()


def wait_for(paths):
    """Waits until these files of one folder are there. After a minute it says so, once."""
    folder = paths[0].parent
    names = {path.name for path in paths}
    since = time.monotonic()
    has_said = False
    # A network file system may remember that a file was not there, but it lists a folder anew.
    while not (folder.exists() and names <= set(os.listdir(folder))):
        if not has_said and time.monotonic() - since > PATIENCE:
            print(f"waits for processes that share {folder.absolute()}", file=sys.stderr)
            has_said = True
        time.sleep(0.2)
